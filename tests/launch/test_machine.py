"""A machine as whoever decides sees it, before it has any process; those are in `test_supervisor.py` and others."""

from pathlib import Path

import torch

from evenstep.exchange.journal import Entry, Journal
from evenstep.launch.job import Job
from evenstep.launch.machine import Here
from evenstep.native import core


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


def test_a_machine_without_processes_has_nobody_to_look_after(new_segment):
    machine = here(new_segment(2))
    machine.look_after(0.0)
    machine.leave_out()
    assert machine.next_look == []
    assert machine.capacity == 2
