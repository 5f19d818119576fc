"""Who is registered, and how far each is: leases end, newcomers start level, and retries are recognised."""

import pytest

from evenstep.core.errors import RefusedError
from evenstep.server.store import workers
from evenstep.server.store.workers import Registry


def registry(*names, lease_s=10.0):
    found = Registry(lease_s)
    for name in names:
        assert found.register(name, 0.0)
    return found


def test_a_worker_is_dropped_when_its_lease_ends_and_not_before():
    found = registry("a", "b")
    found.see("b", 4.0)
    assert found.next_end_s(9.0) == 1.0
    assert found.expire(10.0) == {}
    assert found.expire(10.5) == {"a": 0.0}
    assert found.next_end_s(10.5) == 3.5
    with pytest.raises(RefusedError, match="worker 'a' is not registered, or was dropped after 10 s") as caught:
        found.see("a", 11.0)
    assert caught.value.status == 410


def test_a_worker_that_waits_inside_the_server_is_alive():
    found = registry("a")
    found.registered["a"].waiting = 1
    assert found.expire(1000.0) == {}
    assert found.next_end_s(1000.0) == 10.0


def test_registering_again_is_a_sign_of_life():
    found = registry("a")
    assert not found.register("a", 8.0)
    assert found.expire(15.0) == {}
    assert found.leave("a")
    assert not found.leave("a")


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_worker_may_be_only_so_many_updates_ahead_of_the_slowest(staleness):
    found = registry("fast", "slow")
    for sequence in range(staleness):
        assert not found.is_ahead("fast", staleness)
        found.acknowledge("fast", sequence, sequence + 1, [])
    assert found.is_ahead("fast", staleness)
    assert not found.is_ahead("slow", staleness)
    found.acknowledge("slow", 1, 9, [])
    assert not found.is_ahead("fast", staleness)


def test_a_worker_that_is_alone_is_ahead_of_nobody():
    found = registry("fast", "slow")
    found.acknowledge("fast", 1, 1, [])
    assert found.is_ahead("fast", 1)
    found.leave("slow")
    assert not found.is_ahead("fast", 1)


def test_a_newcomer_starts_level_with_the_slowest():
    found = registry("a", "b")
    for sequence in range(3):
        found.acknowledge("a", sequence, 2 * sequence, [])
        found.acknowledge("b", sequence, 2 * sequence + 1, [])
    found.acknowledge("a", 3, 6, [])
    found.register("c", 0.0)
    assert found.registered["c"].updates == found.slowest() == 3


def test_a_put_is_remembered_and_does_not_count_as_progress():
    found = registry("a")
    found.acknowledge("a", 1, 0, ["note"], counts=False)
    assert found.registered["a"].updates == 0
    assert found.acknowledged["a"].notes == ["note"]


def test_the_last_update_is_remembered_beyond_the_worker_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(workers, "_REMEMBERED", 2)
    found = registry("a", "b", "c")
    found.acknowledge("a", 7, 1, [])
    found.leave("a")
    found.acknowledge("b", 1, 2, [])
    assert found.acknowledged["a"].sequence == 7
    found.acknowledge("a", 8, 3, [])  # the newest of them again
    found.acknowledge("c", 1, 4, [])
    assert list(found.acknowledged) == ["a", "c"]
