"""One Ray cluster of several nodes for all tests in here."""

import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest

import forker
import guests
from guests import fingerprint, nothing_is_left_behind

__all__ = ["fingerprint", "nothing_is_left_behind"]

HERE = Path(__file__).parent
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
PATIENT = {"health_check_failure_threshold": 8}  # a node is not lost because a machine is busy, within 24 s


@contextmanager
def cluster():
    """Its processes ask a forker for ours: they have threads, and are no forks of each other."""
    path = {"PYTHONPATH": guests.importable(HERE / "site", HERE.parent)}
    with tempfile.TemporaryDirectory() as folder, forker.opened(Path(folder)), mock.patch.dict(os.environ, path):
        yield from nodes()


def nodes():
    import cloudpickle
    import ray
    from ray.cluster_utils import Cluster

    guests.ship_by_value(HERE, cloudpickle, ray.cloudpickle)
    first = {**NODE, "include_dashboard": False, "no_monitor": True, "_system_config": PATIENT}
    made = Cluster(initialize_head=True, head_node_args=first)
    made.add_node(**NODE)
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    try:
        yield made
    finally:
        ray.shutdown()
        with suppress(Exception):  # a node that a test has killed
            made.shutdown()


def warm(cluster):
    """A process for Python is there."""
    import ray

    ray.get(ray.remote(lambda: None).remote())


SHARED = guests.shared(HERE, cluster, warm)


@pytest.fixture
def ray():
    """Runs bodies with a Ray cluster of two nodes, a CPU each."""
    pytest.importorskip("ray", reason="Ray is not there: pip install 'evenstep[ray]'")
    return SHARED.driver()


def pytest_runtest_teardown(nextitem):
    """The cluster goes with the last test in here."""
    SHARED.end_before(nextitem)


def pytest_collection_modifyitems(items):
    """See there."""
    guests.give_time(HERE, items)
