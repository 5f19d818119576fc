"""oneDNN cuts its work for the same caches on every processor, also what it had made kernels for before."""

import json
import os
import subprocess
import sys

import pytest

from evenstep.arithmetic.probe import golden
from evenstep.arithmetic.settings import PORTABLE
from evenstep.native import arithmetic

pytestmark = pytest.mark.skipif(not arithmetic.bits(), reason="this processor has no AVX2 and FMA")

CASES = ("conv1d wide", "conv_transpose2d wide")
SCRIPT = f"""
import json, torch
from evenstep.arithmetic.probe import probe
from evenstep.native import arithmetic
probe({CASES})
pinned = [arithmetic.pin_caches("libtorch_cpu.so") for _ in range(2)]
arithmetic.redirect("libtorch_cpu.so")
print(json.dumps([pinned, probe({CASES})]))
"""


def test_caches_are_pinned_and_kernels_for_others_forgotten():
    environment = {**os.environ, **PORTABLE}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    pinned, found = json.loads(done.stdout)
    assert pinned == [[32 << 10, 512 << 10, 1 << 20]] * 2
    if golden().applies:
        assert found == {name: golden().operations[name] for name in CASES}


def test_a_library_without_onednn_is_named():
    with pytest.raises(LookupError, match=r"libm.so.6 has no oneDNN whose caches could be pinned"):
        arithmetic.pin_caches("libm.so.6")
    with pytest.raises(LookupError, match=r"libnone.so is not loaded"):
        arithmetic.pin_caches("libnone.so")
