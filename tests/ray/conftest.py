"""One Ray cluster of several nodes for all tests in here."""

import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import drivers
import processes

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@contextmanager
def cluster():
    import cloudpickle
    import ray
    from ray.cluster_utils import Cluster

    for module in [m for m in list(sys.modules.values()) if "tests/ray" in (getattr(m, "__file__", "") or "")]:
        cloudpickle.register_pickle_by_value(module)
        ray.cloudpickle.register_pickle_by_value(module)
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
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


SHARED = drivers.Shared(Path(__file__).parent, cluster, warm)


@pytest.fixture
def ray():
    """Runs bodies with a Ray cluster of two nodes, a CPU each."""
    pytest.importorskip("ray", reason="Ray is not there: pip install 'evenstep[ray]'")
    return SHARED.driver()


def pytest_runtest_teardown(nextitem):
    """The cluster goes with the last test in here."""
    SHARED.end_before(nextitem)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """The cluster stays, but nothing of ours stays in it."""
    yield
    ours = lambda: [line for line in processes.descendants().values() if "evenstep.agents" in line]  # noqa: E731
    assert processes.until(lambda: not ours(), 10.0), ours()


def pytest_collection_modifyitems(items):
    """A cluster takes its time on a machine that others use too."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
