"""The process from which Spark forks those that run tasks: torch is imported in it, once for all of them."""

import os

from pyspark.daemon import manager

import forks
from evenstep.launch.worker import warm_up

if __name__ == "__main__":
    if forks.is_wanted():
        warm_up()
        forks.install()
    assert len(os.listdir("/proc/self/task")) == 1, "it is forked, so it must not have threads"
    manager()
