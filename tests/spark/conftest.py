"""One Spark application in `local-cluster` mode, with executors in processes of their own, for all tests in here."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import forks
import guests
import processes
from guests import fingerprint, nothing_is_left_behind

__all__ = ["fingerprint", "nothing_is_left_behind"]

HERE = Path(__file__).parent
JAVA = (  # what lives for minutes need not be verified, nor compiled well
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m"
)
OPTIONS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "3",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": JAVA,
    "spark.executor.extraJavaOptions": JAVA,
    "spark.log.level": "OFF",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.daemon.module": "warm_daemon",
    "spark.executorEnv.PYTHONPATH": guests.importable(HERE, HERE.parent),
}


@contextmanager
def application():
    import cloudpickle
    from pyspark import cloudpickle as theirs
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["SPARK_WORKER_DIR"] = os.environ.get("TMPDIR", "/tmp") + "/evenstep-spark-tests"
    forks.install()
    guests.ship_by_value(HERE, cloudpickle, theirs)
    builder = SparkSession.builder.master("local-cluster[2,2,768]").appName("evenstep")
    for name, value in OPTIONS.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.environment["SPARK_SIMPLIFIED_TRACEBACK"] = "1"  # as in SQL: so it is one daemon for both
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
