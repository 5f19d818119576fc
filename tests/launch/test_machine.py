"""A machine as whoever decides sees it, before it has any process; those are in `test_supervisor.py` and others."""

import signal
import time
from pathlib import Path

import torch

from evenstep.exchange.journal import Entry, Journal
from evenstep.launch.job import Job
from evenstep.launch.machine import Here
from evenstep.launch.worker import STACK_SIGNAL
from evenstep.native import core


class Heard:
    """Who is told: keeps what was called, and what a worker wrote."""

    def __init__(self):
        self.calls, self.lines, self.ends = [], [], []

    def heard(self, machine, place, kind, lines):
        self.lines += [line.decode() for line in lines if kind != "events"]

    def gave_up(self, machine, place, text, leaves):
        self.calls.append("gave_up")

    def ended(self, machine, place, end):
        self.calls.append("ended")
        self.ends.append(end.code)


def here(segment, number=0):
    job = Job(Path("train.py"), (), 2, 8)
    return Here(number, "host", job, segment, None, machines=True, job_name="test")


def test_the_journal_of_one_machine_is_taken_in_by_another_from_where_it_is(new_segment):
    ours, theirs = new_segment(2), new_segment(2)
    journal = Journal(ours)
    for number in range(5):
        journal.append(Entry("step", {"loss": number}))
    head, other = here(ours), here(theirs, 1)
    assert (head.committed, other.committed) == (5, 0)
    count, packed = head.journal(0)
    other.catch_up(0, packed)
    assert other.committed == count == 5
    journal.append(Entry("evaluation", [1.5]))
    _, packed = head.journal(3)
    other.catch_up(3, packed)  # two of these it has already
    found = Journal(theirs)
    assert [found.read(number).value for number in range(6)] == [*({"loss": n} for n in range(5)), [1.5]]


def test_no_exchange_there_has_had_a_higher_number(new_segment):
    segment = new_segment(3)
    machine, data = here(segment), torch.ones(1)
    assert machine.round == 0
    for worker, number in ((0, 4), (2, 9)):
        core.post(segment.base, worker, number << 32, "a", data.data_ptr(), data.nbytes)
    assert machine.round == 9


def test_a_worker_that_is_given_up_is_killed_as_soon_as_it_has_written_its_stack(new_segment, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import signal, time
def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [{STACK_SIGNAL}])
    print("here", flush=True)
    time.sleep(0.8)  # a machine has more to do
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [{STACK_SIGNAL}])
deaf()
time.sleep(600)
"""
    )
    heard = Heard()
    machine = Here(0, "host", Job(script, (), 1, 8), new_segment(1), heard, machines=False, job_name="test")
    with machine.children as children:
        machine.start(0, 1)
        while "ended" not in heard.calls:
            children.turn(min([0.05, *(when - time.monotonic() for when in machine.next_look)]))
            machine.look_after(time.monotonic())
            if "here" in heard.lines and "gave_up" not in heard.calls:
                machine.give_up(0, "sleeps")
    assert any("in deaf" in line for line in heard.lines), heard.lines
    assert heard.ends == [-signal.SIGKILL]


def test_a_machine_without_processes_has_nobody_to_look_after(new_segment):
    machine = here(new_segment(2))
    machine.look_after(0.0)
    machine.leave_out()
    assert machine.next_look == []
    assert machine.capacity == 2
