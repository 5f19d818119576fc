"""Segments for tests of one process."""

import os

import pytest

from evenstep.transport.segment import Segment


@pytest.fixture
def new_segment():
    """Makes a segment for so many workers. Keep it in the test itself: it is mapped for as long as anybody has it."""
    fds = []

    def make(num_workers):
        segment = Segment.create(num_workers)
        fds.append(segment.fd)
        return segment

    yield make
    for fd in fds:
        os.close(fd)
