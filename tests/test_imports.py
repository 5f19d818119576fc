"""What an import of evenstep brings into a fresh process, and what it leaves as it was."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, sys, threading
import torch
from torch import nn

def look():
    classes = (nn.BatchNorm2d, nn.DataParallel, nn.Module)
    return (
        [vars(each).get(name) for each in classes for name in ("__init__", "forward", "replicate")], dict(os.environ),
        threading.active_count(), torch.get_num_threads(), torch.distributed.is_initialized(),
    )

before = look()
import evenstep.nn
same = look() == before
kernels = "evenstep.nn.kernels" in sys.modules
import evenstep.run.run
server = sorted(name for name in sys.modules if name.startswith("evenstep.server."))
print(json.dumps({"same": same, "kernels": kernels, "server": server}))
"""


@pytest.fixture(scope="module")
def found():
    """What a process of its own says: torch is imported into it but once for all tests here."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_importing_changes_nothing(found):
    assert found["same"]


def test_importing_evenstep_does_not_import_the_kernels(found):
    assert not found["kernels"]


def test_a_run_imports_clients_and_nothing_of_the_server_side(found):
    rooms = {name.split(".")[2] for name in found["server"]}
    assert rooms == {"client", "wire"}, found
    assert len(found["server"]) <= 22, found
