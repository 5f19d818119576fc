"""Without GPUs, sites meet in the segment; `tests/engine/test_on_cuda.py` has those with."""

import torch
from fakes import FakeFixed, FakeRounds, Table

from evenstep.exchange.group import Group
from evenstep.exchange.sites import open_windows
from evenstep.transport.windows import HostWindows


def test_on_a_cpu_windows_lie_in_the_segment_and_nobody_is_asked(new_segment):
    rounds = FakeRounds(Table(), 0)
    group = Group(new_segment(2), rounds, FakeFixed(2))
    windows = open_windows(group, torch.device("cpu"), [2, 1], 64, "a test")
    assert isinstance(windows, HostWindows)
    assert rounds.among == []
