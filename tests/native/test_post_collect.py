"""Posting, collecting and aborting between processes, at the level of the C core."""

import os
import random
import signal

import pytest
import torch

from evenstep.native import core
from workers import inherited_segment, run_outcomes, run_workers

SECOND_NS = 1_000_000_000


def post(base: int, worker: int, seq: int, tag: str, data: bytes) -> None:
    memory = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    core.post(base, worker, seq, tag, memory.data_ptr(), len(data))


def collect(base: int, worker: int, seq: int, tag: str, num_bytes: int, wait_ns: int = 20 * SECOND_NS) -> int | bytes:
    memory = torch.zeros(max(num_bytes, 1), dtype=torch.uint8)
    rc = core.collect(base, worker, seq, tag, memory.data_ptr(), num_bytes, 10, wait_ns)
    return rc if rc != core.ES_OK else bytes(memory.numpy())[:num_bytes]


def full(number: int) -> int:
    return number << 32


def test_what_one_process_posts_another_collects():
    def body(worker):
        segment = inherited_segment()
        base = segment.base
        post(base, worker, full(1), "greeting", b"hello from %d" % worker)
        return collect(base, 1 - worker, full(1), "greeting", 12)

    assert run_workers(2, body) == [b"hello from 1", b"hello from 0"]


def test_a_waiter_looks_around_when_its_slice_is_over():
    def body(worker):
        segment = inherited_segment()
        return collect(segment.base, 1, full(1), "never", 4, wait_ns=1_000_000)

    assert run_workers(2, body) == [core.ES_AGAIN] * 2


def test_another_tag_another_size_and_another_number_are_mismatches():
    def body(_):
        segment = inherited_segment()
        base = segment.base
        post(base, 1, full(2), "x" * 300 + "a", b"four")
        return [
            collect(base, 1, full(2), "x" * 300 + "a", 4),
            collect(base, 1, full(2), "x" * 300 + "b", 4),  # longer than what is kept of a tag
            collect(base, 1, full(2), "x" * 300 + "a", 3),
            collect(base, 1, full(1), "x" * 300 + "a", 4),
            core.last_post(base, 1),
        ]

    wrong = core.ES_MISMATCH
    assert run_workers(1, body)[0] == [b"four", wrong, wrong, wrong, (full(2), 4, "x" * (core.ES_TAG_BYTES - 1), 0)]


def test_a_post_that_does_not_fit_is_refused():
    def body(worker):
        segment = inherited_segment()
        with pytest.raises(ValueError, match="does not fit"):
            core.post(segment.base, worker, full(1), "large", 0, segment.slot_bytes + 1)
        return core.last_post(segment.base, worker)

    assert run_workers(1, body) == [(0, 0, "", 0)]


def test_an_abort_wakes_all_who_wait_and_the_first_one_counts():
    def body(worker):
        segment = inherited_segment()
        base = segment.base
        if worker == 3:
            core.abort_all(base, 3, 1, "worker 1 is no more")
            core.abort_all(base, 3, 3, "too late")
        rc = collect(base, 3, full(1), "never", 4)
        return rc, core.aborted(base)

    assert run_workers(4, body) == [(core.ES_ABORTED, (1, "worker 1 is no more"))] * 4


def test_many_who_abort_at_once_never_mix_their_texts():
    def body(worker):
        segment = inherited_segment()
        base = segment.base
        post(base, worker, full(1), "ready", b"")
        for other in range(4):
            collect(base, other, full(1), "ready", 0)
        text = chr(ord("a") + worker) * 60_000
        won = core.abort_all(base, worker, 0, text)
        culprit, found = core.aborted(base)
        return won, culprit, found[0], len(found), len(set(found))

    for _ in range(5):
        found = run_workers(4, body)
        assert sum(won for won, *_ in found) == 1
        assert {rest[1:] for rest in found} == {(0, found[0][2], 60_000, 1)}


def test_an_abort_that_came_later_than_the_data_does_not_hide_the_data():
    def body(_):
        segment = inherited_segment()
        base = segment.base
        post(base, 0, full(1), "done", b"data")
        core.abort_all(base, 0, 0, "afterwards")
        return collect(base, 0, full(1), "done", 4), collect(base, 0, full(2), "next", 4)

    assert run_workers(1, body) == [(b"data", core.ES_ABORTED)]


def test_a_process_that_dies_while_it_waits_leaves_the_others_unharmed():
    def body(worker):
        segment = inherited_segment()
        base = segment.base
        core.set_pid(base, worker, os.getpid())
        if worker == 2:
            post(base, 2, full(1), "last words", b"")
            collect(base, 0, full(5), "never", 4)
        collect(base, 2, full(1), "last words", 0)
        if worker == 0:
            os.kill(core.pid(base, 2), signal.SIGKILL)
        for number in range(2, 200):
            post(base, worker, full(number), "on", bytes([number]))
            assert collect(base, 1 - worker, full(number), "on", 1) == bytes([number])

    outcomes = run_outcomes(3, body)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, -signal.SIGKILL], outcomes


def test_slots_are_never_overwritten_while_somebody_reads_them():
    """Rounds of all and rounds of some in any mixture; every byte is a function of who posted it when."""
    num_workers, num_rounds = 3, 700

    def content(worker: int, seq: int, size: int) -> bytes:
        return random.Random(seq * 7 + worker).randbytes(size)

    def body(worker):
        segment = inherited_segment()
        base = segment.base
        schedule = random.Random(5)
        for number in range(1, num_rounds):
            members = sorted(schedule.sample(range(num_workers), schedule.choice([2, 2, 3])))
            inner = schedule.choice([0, 0, 1, 2, 3, 6])
            for n in range(inner + 1):
                seq = full(number) + n
                size = schedule.choice([0, 1, 64, 5000])
                among = members if n else range(num_workers)
                if worker not in among:
                    continue
                post(base, worker, seq, f"round {seq}", content(worker, seq, size))
                for other in among:
                    found = collect(base, other, seq, f"round {seq}", size)
                    assert found == content(other, seq, size), (worker, other, number, n, found)

    run_workers(num_workers, body)


def test_a_word_is_stored_and_loaded():
    word = torch.zeros(1, dtype=torch.int64)
    core.store(word.data_ptr(), 2**63 + 5)
    assert core.load(word.data_ptr()) == 2**63 + 5


def test_many_words_are_stored_at_once():
    words = torch.zeros(4, dtype=torch.int64)
    core.store_all(tuple(words.data_ptr() + 8 * n for n in (0, 3)), 7)
    assert words.tolist() == [7, 0, 0, 7]
