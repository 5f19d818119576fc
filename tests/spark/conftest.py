"""One Spark application in `local-cluster` mode, with executors in processes of their own, for all tests in here."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import guests
import processes
from guests import fingerprint, nothing_is_left_behind

__all__ = ["fingerprint", "nothing_is_left_behind"]

HERE = Path(__file__).parent
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
    guests.ship_by_value(HERE, cloudpickle, theirs)
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


SHARED = guests.shared(HERE, application, warm)


@pytest.fixture
def spark():
    """Runs bodies with a Spark session."""
    pytest.importorskip("pyspark", reason="Spark is not there: pip install 'evenstep[spark]'")
    return SHARED.driver()


def pytest_runtest_teardown(nextitem):
    """The cluster goes with the last test in here."""
    SHARED.end_before(nextitem)


def pytest_collection_modifyitems(items):
    """See there."""
    guests.give_time(HERE, items)
