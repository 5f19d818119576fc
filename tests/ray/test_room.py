"""Room on the nodes of a cluster: arithmetic, and what Ray says of it."""

import pytest

import processes
from workers import run_workers


def look_as_a_client(cluster):
    """What every node has free, as a driver sees it that is connected by `ray://`."""
    from unittest import mock

    from evenstep.ray import room

    def look():
        with mock.patch.object(room, "is_client", return_value=True):
            of_client = room.nodes_of_cluster()
        return of_client == room.nodes_of_cluster() and len(of_client) == 2

    return processes.until(look)  # what earlier tests had may be freed in between


def test_room_is_found_through_ray_client(ray):
    assert ray.call(look_as_a_client)


def test_workers_fit_by_the_scarcest_of_what_they_take():
    pytest.importorskip("ray", reason="Ray is not there: pip install 'evenstep[ray]'")

    def body(worker):
        import warnings

        warnings.simplefilter("default")  # those of Ray are no errors
        from evenstep.ray.room import as_options, needs_of_worker, room_in

        needs = needs_of_worker(0.1, 0, {"tape": 1})
        free = [{"CPU": 0.3, "tape": 9.0}, {"CPU": 8.0, "tape": 2.0}, {"CPU": 8.0}, {}]
        return [room_in(each, needs) for each in free], as_options({"CPU": 2, "tape": 1})

    expected = [3, 2, 0, 0], {"num_cpus": 2, "num_gpus": 0, "resources": {"tape": 1}}
    assert run_workers(1, body) == [expected]
