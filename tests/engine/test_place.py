"""Where a worker computes can be found by whoever has to pull the machine."""

import os
import re
import socket

import torch

from evenstep.core.identity import last_core
from evenstep.engine.place import place_of


def test_it_is_machine_process_and_core():
    found = re.fullmatch(r"machine (\S+), process (\d+), core (\d+)", place_of(torch.device("cpu")))
    assert found[1] == socket.gethostname()
    assert int(found[2]) == os.getpid()
    assert int(found[3]) in os.sched_getaffinity(0)


def test_the_core_is_the_one_that_the_process_is_bound_to():
    before = os.sched_getaffinity(0)
    try:
        for core in sorted(before)[:2]:
            os.sched_setaffinity(0, {core})
            assert last_core() == core
    finally:
        os.sched_setaffinity(0, before)
