"""The example says what it promises."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch

from workers import run_workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_batchnorm.py"


def test_only_the_converted_network_equals_one_process(monkeypatch):
    def forked(function, args, nprocs):
        return torch.multiprocessing.start_processes(function, args, nprocs, start_method="fork")

    monkeypatch.setattr(torch.multiprocessing, "spawn", forked)  # so that torch need not be imported three times

    def body(_):
        spec = importlib.util.spec_from_file_location("example", EXAMPLE)
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            example.main()
        return said.getvalue()

    (said,) = run_workers(1, body)
    differences = dict(re.findall(r"DDP, (\w+) +batch norm: (\S+)", said))
    assert float(differences["plain"]) > 1e-3, said
    assert float(differences["converted"]) < 1e-9, said
    assert pytest.approx(0.58, abs=0.1) == float(differences["plain"]), "it is the same from run to run"
