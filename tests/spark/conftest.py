"""One Spark application in `local-cluster` mode, with executors in processes of their own, for all tests in here."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import drivers
import processes

OPTIONS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "3",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.log.level": "OFF",
    "spark.ui.showConsoleProgress": "false",
}


@contextmanager
def application():
    import cloudpickle
    from pyspark import cloudpickle as theirs
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["SPARK_WORKER_DIR"] = os.environ.get("TMPDIR", "/tmp") + "/evenstep-spark-tests"
    for module in [m for name, m in sys.modules.items() if getattr(m, "__file__", "") and "tests/spark" in m.__file__]:
        theirs.register_pickle_by_value(module)
        cloudpickle.register_pickle_by_value(module)
    builder = SparkSession.builder.master("local-cluster[2,2,768]").appName("evenstep")
    for name, value in OPTIONS.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def warm(session):
    """Both executors are there, and have a process for Python."""
    executors = lambda _: [os.getppid()]  # noqa: E731
    assert processes.until(
        lambda: len(set(session.sparkContext.parallelize(range(4), 4).mapPartitions(executors).collect())) == 2, 200.0
    )


SHARED = drivers.Shared(Path(__file__).parent, application, warm)


@pytest.fixture
def spark():
    """Runs bodies with a Spark session."""
    pytest.importorskip("pyspark", reason="Spark is not there: pip install 'evenstep[spark]'")
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
