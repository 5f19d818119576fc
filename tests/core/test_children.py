"""Forked processes: their streams and descriptors, what they write, how they end, and when they die."""

import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

import processes
from evenstep.core.children import Child, Children, default_signals, fork, signal_name
from evenstep.core.errors import ConfigError


class Heard:
    """Notes everything that `Children` hands on."""

    def __init__(self):
        self.lines, self.ends = [], []
        self.children = Children(self._heard, self._ended)

    def _heard(self, child, kind, lines):
        self.lines += [(kind, line) for line in lines]

    def _ended(self, child):
        self.ends.append(child.code)
        self.lines.append(("end", child.code))

    def run(self, main, kinds=("out", "err", "events"), timeout_s=30.0):
        with self.children as children:
            child = children.start(main, kinds)
            deadline = time.monotonic() + timeout_s
            while child.alive:
                assert time.monotonic() < deadline, "it did not end"
                children.turn(0.1)
            children.finish(1.0)
        return self.lines


# ---- one child ----


def test_a_child_does_one_thing_and_its_result_is_its_exit_code():
    assert fork(lambda: 7).reap() == 7


def test_a_child_has_an_empty_input_a_session_of_its_own_and_no_descriptor_that_it_was_not_given():
    mine, kept = os.memfd_create("mine"), os.memfd_create("kept")

    def main():
        assert sys.stdin.read() == ""
        assert os.getsid(0) == os.getpid()
        found = {
            fd: os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 256) if os.path.lexists(f"/proc/self/fd/{fd}")
        }
        assert "kept" in found.pop(kept)
        assert found.pop(mine) == os.devnull
        assert set(found.values()) <= {os.devnull}
        assert not any(map(os.get_inheritable, found))
        return 0

    try:
        assert fork(main, keep={kept}).reap() == 0
    finally:
        os.close(mine)
        os.close(kept)


@pytest.mark.parametrize("missing", [(0,), (0, 1), (0, 1, 2)])
def test_a_child_of_a_process_without_streams_has_them(missing):
    def main():
        streams = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
        return 0 if streams[0] == os.devnull and all(streams[fd] == os.devnull for fd in missing) else 4

    def without():
        for fd in missing:
            os.close(fd)
        return fork(main).reap()

    assert fork(without).reap() == 0


def test_what_came_along_writes_and_closes_nothing_of_the_childs_own(tmp_path):
    theirs = [(tmp_path / "theirs").open("w")]
    theirs[0].write("not flushed yet")

    def main():
        mine = [os.open(tmp_path / f"mine{n}", os.O_CREAT | os.O_RDWR) for n in range(100)]
        theirs.clear()
        for n, fd in enumerate(mine):
            assert os.write(fd, b"mine") == 4
            assert (tmp_path / f"mine{n}").read_text() == "mine"
        return 0

    assert fork(main).reap() == 0
    theirs[0].close()
    assert (tmp_path / "theirs").read_text() == "not flushed yet"


def test_an_error_of_ours_is_a_sentence_and_any_other_is_shown_whole():
    def ours(_):
        raise ConfigError("too many cooks")

    def other(_):
        raise ValueError("a bad day")

    assert Heard().run(ours) == [("err", b"evenstep: too many cooks"), ("end", ConfigError.exit_code)]
    lines = Heard().run(other)
    assert lines[-2:] == [("err", b"ValueError: a bad day"), ("end", 1)]


def test_a_child_dies_with_its_parent():
    reading, writing = os.pipe()

    def parent():
        child = fork(lambda: time.sleep(60) or 0)
        os.write(writing, str(child.pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert fork(parent, keep={writing}).reap() == -signal.SIGKILL
    pid = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    assert processes.until(lambda: not processes.is_alive(pid))


def test_what_a_child_started_ends_with_it_unless_it_went_well():
    reading, writing = os.pipe()

    def main():
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
        os.write(writing, str(pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    child = fork(main, keep={writing})
    assert child.reap() == -signal.SIGKILL
    grandchild = int(os.read(reading, 20))
    os.close(reading)
    os.close(writing)
    assert processes.until(lambda: not processes.is_alive(grandchild))


def test_the_end_of_a_child_is_waited_for_and_described():
    child = fork(lambda: time.sleep(60) or 0)
    assert child.alive
    assert not child.wait(0.01)
    child.signal(signal.SIGSTOP)
    assert processes.until(child.is_stopped)
    child.kill()
    assert (child.code, child.alive, child.wait(0.0)) == (-signal.SIGKILL, False, True)
    assert child.describe_end() == "was killed by SIGKILL"
    child.signal(signal.SIGTERM)  # which goes nowhere: its number may be another's by now
    other = fork(lambda: 3)
    other.reap()
    assert other.describe_end() == "ended with exit code 3"


def test_a_stopped_child_handles_an_interrupt_where_it_was_stopped():
    number, stacks = signal.SIGRTMIN + 1, os.memfd_create("stacks")

    def stop_here():
        os.kill(os.getpid(), signal.SIGSTOP)

    def main():
        faulthandler.register(number, file=stacks, all_threads=True)
        for _ in range(6):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        for _ in range(10):
            stop_here()
        os._exit(0)

    child = fork(main, keep={stacks})
    for _ in range(10):
        assert processes.until(child.is_stopped)
        child.interrupt(number)
        child.signal(signal.SIGCONT)
    assert child.reap() == 0
    child.interrupt(number)  # which goes nowhere
    found = os.pread(stacks, 1 << 20, 0).decode()
    os.close(stacks)
    assert (found.count("Current thread"), found.count("in stop_here")) == (10, 10)


def test_signals_have_names_or_numbers():
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert signal_name(signal.SIGRTMIN + 3) == f"signal {signal.SIGRTMIN + 3}"


def test_signals_that_the_parent_handles_do_in_a_child_what_they_always_do():
    def main():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        default_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert fork(main).reap() == -signal.SIGTERM


# ---- several, through one selector ----


def test_lines_come_whole_and_before_the_end():
    def main(pipes):
        os.write(1, b"one\ntw")
        os.write(2, b"beside\n")
        os.write(pipes["events"], b'{"a": 1}\n')
        os.write(1, b"o\nno line feed")
        return 4

    lines = Heard().run(main)
    assert [line for kind, line in lines if kind == "out"] == [b"one", b"two", b"no line feed"]
    assert [line for kind, line in lines if kind == "err"] == [b"beside"]
    assert [line for kind, line in lines if kind == "events"] == [b'{"a": 1}']
    assert lines[-1] == ("end", 4)


def test_an_event_whose_writer_was_killed_in_the_middle_is_none():
    def main(pipes):
        os.write(pipes["events"], b'{"a": 1}\n{"b": [')
        os.kill(os.getpid(), signal.SIGKILL)

    lines = Heard().run(main)
    assert [line for kind, line in lines if kind == "events"] == [b'{"a": 1}']
    assert lines[-1] == ("end", -signal.SIGKILL)


def test_what_comes_without_an_end_comes_in_pieces_but_an_event_is_whole():
    def main(pipes):
        for fd in (1, pipes["events"]):
            data = memoryview(b"x" * 3_000_000)
            while data:
                data = data[os.write(fd, data) :]
        os.write(pipes["events"], b"\n")
        return 0

    lines = Heard().run(main)
    out = [line for kind, line in lines if kind == "out"]
    assert len(out) > 1
    assert b"".join(out) == b"x" * 3_000_000
    assert [len(line) for kind, line in lines if kind == "events"] == [3_000_000]


def test_what_a_childs_child_still_writes_is_heard_only_for_a_while():
    reading, writing = os.pipe()

    def main(_):
        if os.fork() == 0:
            os.setsid()
            os.close(writing) if writing > 2 else None
            time.sleep(60)
        os.write(1, b"begun")
        return 0

    begin = time.monotonic()
    lines = Heard().run(main)
    assert time.monotonic() - begin < 30.0
    assert ("out", b"begun") in lines
    os.close(reading)
    os.close(writing)
    for pid in processes.descendants():
        os.kill(pid, signal.SIGKILL)


def test_the_ends_of_several_come_in_the_order_of_their_starts():
    heard = Heard()
    with heard.children as children:
        made = [children.start(lambda _, code=code: code, ()) for code in (1, 2, 3)]
        for child in made:
            assert child.wait(30.0)
        children.turn(1.0)
    assert heard.ends == [1, 2, 3]


def test_other_sources_are_watched_beside_them():
    heard, reading_writing = Heard(), os.pipe()
    reading, writing = (os.fdopen(fd, mode) for fd, mode in zip(reading_writing, ("rb", "wb"), strict=True))
    got = []
    with heard.children as children, reading, writing:
        children.watch(reading, lambda: got.append(os.read(reading.fileno(), 10)))
        assert not children.turn(0.0)
        os.write(writing.fileno(), b"hello")
        assert children.turn(1.0)
        children.forget(reading)
        os.write(writing.fileno(), b"again")
        assert not children.turn(0.0)
    assert got == [b"hello"]


def test_closing_ends_everyone():
    with Heard().children as children:
        child = children.start(lambda _: time.sleep(60) or 0, ("out",))
    assert child.code == -signal.SIGKILL
    assert select.select([], [], [], 0) == ([], [], [])


def test_a_child_that_was_forked_elsewhere_can_be_adopted():
    heard = Heard()
    with heard.children as children:
        child = fork(lambda: 5)
        children.adopt(child)
        while child.alive:
            children.turn(1.0)
    assert heard.ends == [5]


def test_to_end_a_child_that_has_ended_by_itself_concerns_nobody_else():
    heard = Heard()
    with heard.children as children:
        first = children.start(lambda _: 1, ())
        while first.alive:
            children.turn(1.0)
        second = children.start(lambda _: 2, ())
        assert second.pidfd == first.pidfd, "else nothing was tried"
        children.end(first)
        while second.alive:
            assert children.turn(20.0)
    assert heard.ends == [1, 2]


def test_a_process_that_is_already_gone_cannot_become_a_child():
    done = subprocess.Popen(["true"])
    done.wait()
    with pytest.raises(ProcessLookupError):
        Child(done.pid)


def test_a_child_that_was_ended_meanwhile_is_not_taken_for_the_one_that_has_its_descriptor_now():
    ended, later = [], []

    def on_end(child):
        ended.append(child)
        if child is first:
            children.end(second)
            later.extend(children.start(lambda _: 3, ()) for _ in range(2))  # with the descriptors of both

    with Children(lambda *_: None, on_end) as children:
        first, second = children.start(lambda _: 1, ()), children.start(lambda _: 2, ())
        assert first.wait(30.0)
        assert second.wait(30.0)
        deadline = time.monotonic() + 30.0
        while len(ended) < 3:
            assert time.monotonic() < deadline, "they were not heard of"
            children.turn(0.1)
        assert second.pidfd in {child.pidfd for child in later}, "else nothing was tried"
    assert ended[0] is first
    assert set(ended[1:]) == set(later)
