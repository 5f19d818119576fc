"""A message whose sender dies, stops or leaves: before it, in the middle of it, after it. Nobody waits for ever."""

import os
import re
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from ranks import run_rank_outcomes, run_ranks, same, until_it_waits, values
from torch import distributed as dist

import processes
from evenstep.core.errors import ConfigError, EvenstepError, PeerError, SilenceError
from evenstep.distributed import mail
from evenstep.native import core

LARGE = 1_200_000  # many times what fits between two ranks
TIMEOUT_S = 0.3  # of a rank that is to miss another
PATIENT_S = 30.0  # of one that is to hear of it


def failure(kind: type[EvenstepError], action) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def receive(tensor, source, *, asynchronous=False, tag=0):
    if asynchronous:
        dist.irecv(tensor, source, tag=tag).wait()
    else:
        dist.recv(tensor, source, tag=tag)


WAYS = {
    "a receive": lambda found, source: receive(found, source),
    "an asynchronous one": lambda found, source: receive(found, source, asynchronous=True),
    "one from any source": lambda found, source: receive(found, None),
    "one of another tag": lambda found, source: receive(torch.empty(3), source, tag=7),
}
ENDS = {"killed": (signal.SIGKILL, PeerError), "stopped": (signal.SIGSTOP, SilenceError)}


def everyone(timeout_s=PATIENT_S):
    """The processes of all ranks, and a timeout that a test can wait for from now on."""
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    dist.group.WORLD.set_timeout(timedelta(seconds=timeout_s))
    return pids


def until_it_is_over(pid):
    assert processes.until(lambda: not processes.is_alive(pid) or processes.is_stopped(pid))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", ENDS)
def test_a_sender_that_ends_in_the_middle_of_its_message_is_named_to_all(end, way, num_ranks):
    number, kind = ENDS[end]

    def body(rank):
        pids, sender = everyone(TIMEOUT_S if rank == 0 else PATIENT_S), num_ranks - 1
        if rank == sender:
            dist.isend(torch.ones(LARGE), 0)  # what there is room for goes at once
            os.kill(os.getpid(), number)
            return None
        until_it_is_over(pids[sender])
        if rank == 0:
            text = failure(kind, lambda: WAYS[way](torch.empty(LARGE), sender))
        else:
            text = failure(kind, dist.barrier)
        assert text.startswith(f"rank {sender} (pid {pids[sender]} on "), text
        if rank == 0 and end == "stopped":
            os.kill(pids[sender], signal.SIGCONT)
        return text

    texts = [outcome.value for outcome in run_rank_outcomes(num_ranks, body)[: num_ranks - 1]]
    assert texts[0], "the receiver fell"
    assert len(set(texts)) == 1, texts


@pytest.mark.parametrize("end", ENDS)
def test_whoever_waits_for_one_that_waits_names_the_last_of_them(end):
    """Rank 2 is missing to rank 1 only; ranks 0 and 3 wait for rank 1, which is not to blame."""
    number, kind = ENDS[end]

    def body(rank):
        pids = everyone(PATIENT_S if rank == 1 else TIMEOUT_S)  # those who wait for rank 1 give up first
        if rank == 2:
            os.kill(os.getpid(), number)
            return None
        until_it_is_over(pids[2])
        if rank != 1:
            until_it_waits(1, [2])
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{rank} has looked", "")
            store.wait([f"{other} has looked" for other in (0, 3)])
        waits = {0: lambda: receive(torch.empty(4), 1), 1: lambda: receive(torch.empty(4), 2), 3: dist.barrier}
        text = failure(kind, waits[rank])
        if rank == 1 and end == "stopped":
            os.kill(pids[2], signal.SIGCONT)
        assert text.startswith(f"rank 2 (pid {pids[2]} on "), text
        return text

    found = run_rank_outcomes(4, body)
    texts = {outcome.value for rank, outcome in enumerate(found) if rank != 2}
    assert len(texts) == 1, found


def test_ranks_that_wait_for_each_other_are_all_named():
    def body(rank):
        everyone(PATIENT_S if rank == 1 else TIMEOUT_S)
        if rank == 0:
            until_it_waits(1, [0])
        return failure(SilenceError, lambda: receive(torch.empty(4), 1 - rank))

    for text in run_ranks(2, body):
        assert re.search(r"rank [01] .* waits in receive from rank [01]", text), text
        assert re.search(r"which waits for rank [01] .* itself", text), text


@pytest.mark.parametrize("size", [10, 60_000])
def test_what_was_sent_before_the_sender_died_still_arrives(size):
    sent = values((size,), torch.float32, 1)

    def body(rank):
        pids = everyone()
        if rank == 1:
            dist.send(sent, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        until_it_is_over(pids[1])
        found = torch.empty(size)
        receive(found, 1)
        assert same(found, sent)
        assert "rank 1 " in failure(PeerError, lambda: receive(found, 1))

    assert [outcome.kind for outcome in run_rank_outcomes(2, body)] == [None, "Killed"]


def let_time_pass_with_every_fragment(timeout_s):
    """Let the mail of this rank see almost its timeout pass whenever a message moves, and no time otherwise."""
    really, begin, clock = mail._Message.advance, time.monotonic(), SimpleNamespace(passed_s=0.0)

    def advance(message, fragments):
        moved = really(message, fragments)
        clock.passed_s += 0.9 * timeout_s * moved
        return moved

    mail._Message.advance = advance
    mail.time = SimpleNamespace(monotonic=lambda: begin + clock.passed_s)
    return clock


def pull_one_by_one():
    """Let this rank take one fragment at a time, however many are there."""
    fragment_bytes = 1 << 16
    assert [core.mail_fragments(fragment_bytes + more) for more in (0, 1)] == [1, 2]

    def pull(box, num_ranks, source, target, num_bytes, data, fragments):
        some_bytes = min(num_bytes, (fragments + 1) * fragment_bytes)
        return core.mail_pull(box, num_ranks, source, target, some_bytes, data, fragments)

    mail.core = SimpleNamespace(**{**vars(core), "mail_pull": pull})


def test_a_large_message_may_take_longer_than_the_timeout_as_long_as_it_moves():
    sent = values((LARGE,), torch.float32, 2)

    def body(rank):
        everyone()
        clock = let_time_pass_with_every_fragment(PATIENT_S)
        if rank == 1:
            dist.send(sent, 0)
        else:
            found = torch.empty(LARGE)
            pull_one_by_one()
            receive(found, 1)
            assert same(found, sent)
            assert clock.passed_s == pytest.approx(0.9 * PATIENT_S * core.mail_fragments(4 * LARGE))

    run_ranks(2, body)


def test_messages_that_wait_for_their_turn_are_not_silent():
    def body(rank):
        everyone()
        clock = let_time_pass_with_every_fragment(PATIENT_S)
        large = torch.ones(200_000)
        if rank == 1:
            for work in [dist.isend(large, 0) for _ in range(6)]:
                work.wait()
            assert clock.passed_s > 2 * PATIENT_S
        else:
            for _ in range(6):
                receive(torch.empty_like(large), 1)

    run_ranks(2, body)


def test_a_sender_that_leaves_in_the_middle_of_its_message_is_named():
    def body(rank):
        everyone()
        if rank == 1:
            work = dist.isend(torch.ones(LARGE), 0)
            dist.destroy_process_group()
            failure(ConfigError, work.wait)
            dist.init_process_group("evenstep", store=dist.HashStore(), rank=0, world_size=1)
            return None
        return failure(PeerError, lambda: receive(torch.empty(LARGE), 1))

    assert re.search(r"rank 1 .* left the group; rank 0 .* waits for it in receive from rank 1", run_ranks(2, body)[0])


def test_a_thread_that_falls_tells_everyone():
    """Such as one that has no memory for a message that was put aside: nobody may wait for a thread that is gone."""

    def body(rank):
        everyone()
        if rank == 1:
            receive(torch.empty(1), 0)  # it is waiting by now
            dist.isend(torch.ones(10), 0, tag=1)
            return failure(PeerError, dist.barrier)

        def no_memory(*_, **__):
            raise RuntimeError("you tried to allocate 40 bytes")

        empty = torch.empty(10)
        work = dist.irecv(empty, 1, tag=2)
        mail.torch = type("Torch", (), {"empty": no_memory, "uint8": torch.uint8})
        dist.send(torch.ones(1), 1)
        return failure(PeerError, work.wait)

    for text in run_ranks(2, body):
        assert re.search(r"rank 0 .* could not move its messages: .*you tried to allocate 40 bytes", text), text
