"""Workers of one process: peers are threads that exchange through a table, around a segment of their own."""

import os

import pytest
from fakes import FakeFixed, FakeRounds, Table

from evenstep.core.config import RunConfig
from evenstep.engine.holdings import Holdings
from evenstep.exchange.group import Group
from evenstep.exchange.ledger import Ledger
from evenstep.transport.segment import Segment


@pytest.fixture
def config():
    """Makes the configuration of a run of four shards."""

    def make(**changes):
        said = {
            "shards": 4, "seed": 3, "threads": 1, "device": "cpu", "timeout_s": 60.0, "quiet": True,
            "on_nondeterminism": "error",
        }  # fmt: skip
        return RunConfig(**said | changes)

    return make


@pytest.fixture
def groups_of():
    """Makes so many workers, each with its own view of one segment."""
    fds = []

    def make(num_workers):
        fds.append(Segment.create(num_workers).fd)
        table = Table()
        return [
            Group(Segment(fds[-1]), FakeRounds(table, worker), FakeFixed(num_workers)) for worker in range(num_workers)
        ]

    yield make
    for fd in fds:
        os.close(fd)


@pytest.fixture
def holdings_of(config, groups_of):
    """Makes the holdings of so many workers."""

    def make(num_workers=1, **changes):
        return [Holdings(config(**changes), Ledger(group)) for group in groups_of(num_workers)]

    return make
