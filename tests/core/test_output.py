"""Output that nobody can read any more: it is dropped, and nothing else happens."""

import errno
import io
import os
import sys

import pytest

from evenstep.core.output import say, unheard


@pytest.fixture
def broken():
    """A stream whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    yield stream
    stream.close()  # which writes what is left, and would raise


def test_what_is_written_to_a_pipe_without_a_reader_goes_nowhere(broken):
    for _ in range(3):
        with unheard(broken):
            print("hello", file=broken, flush=True)
    assert os.readlink(f"/proc/self/fd/{broken.fileno()}") == os.devnull


def test_only_the_stream_that_is_broken_is_let_go(broken):
    with open(os.memfd_create("whole"), "w+") as whole:
        with unheard(whole, broken):
            print("first", file=whole)
            print("hello", file=broken, flush=True)
        print("second", file=whole)
        whole.seek(0)
        assert whole.read() == "first\nsecond\n"


def test_what_fails_for_now_is_tried_again():
    with open("/dev/full", "w") as full:
        with unheard(full):
            print("hello", file=full, flush=True)
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_stream_without_a_descriptor_may_break_too(monkeypatch):
    class Broken(io.StringIO):
        def write(self, *_):
            raise OSError(errno.EPIPE, "gone")

        flush = write

    monkeypatch.setattr(sys, "stderr", Broken())
    say("hello")
