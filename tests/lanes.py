"""How `make test` shares the tests among several processes: a file at a time, the longest first.

The tests of a folder that shares a cluster stay together.
"""

from typing import Any

import pytest

_TOGETHER = ("tests/spark/", "tests/ray/")
_LONG = (*_TOGETHER, "tests/launch/test_machines.py", "tests/launch/", "tests/transformers/", "tests/lightning/")


def order(item: pytest.Item) -> int:
    """Where a test belongs: what takes long begins early, so that nobody waits for it at the end."""
    return next((place for place, long in enumerate(_LONG) if item.nodeid.startswith(long)), len(_LONG))


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands out files, and some folders, in the order in which they were collected."""
    from xdist.scheduler import LoadFileScheduling  # who asks has it

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in _TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return Scheduler(config, log)
