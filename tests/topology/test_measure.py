import os
import time

import pytest

from evenstep.core.errors import EvenstepError
from evenstep.exchange.group import Group
from evenstep.topology import measure as module
from evenstep.topology import read_cores
from evenstep.topology.measure import measure

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="only one core is allowed here")


@needs_two
def test_every_pair_of_cores_is_measured():
    cores = read_cores(allowed=sorted(os.sched_getaffinity(0))[:3])
    found = measure(1 << 19, cores)
    count = cores.num_devices
    assert [(a, b) for a, b, _ in found.machines[0].links] == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    for a, b, link in found.machines[0].links:
        assert link.kind == cores.link(a, b).kind
        assert link.bandwidth_bytes_per_s > 0
        assert link.latency_s > 0


def test_one_core_has_nobody_to_talk_to():
    cores = read_cores(allowed=[min(os.sched_getaffinity(0))])
    assert measure(1 << 19, cores) is cores


@needs_two
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_worker_that_fails_ends_the_measurement(monkeypatch, how):
    def barrier(group: Group, _tag: str) -> None:
        if group.worker == 1 and how == "dies":
            os._exit(3)
        raise ValueError("no barrier today")

    monkeypatch.setattr(Group, "barrier", barrier)
    with pytest.raises(EvenstepError, match="no barrier today"):
        measure(1 << 19)


@needs_two
def test_a_worker_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(module, "_PAIR_S", 0.0)
    monkeypatch.setattr(module, "_exchange_pairwise", lambda *_: time.sleep(30))
    with pytest.raises(EvenstepError, match=r"could not be measured within 0\.2 s"):
        measure(1 << 19)
