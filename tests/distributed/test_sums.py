"""Sums that are known take a short way through the C core. What is not as usual does not; failures read the same."""

import os
import re
import signal
from datetime import timedelta

import pytest
import torch
from ranks import run_rank_outcomes, run_ranks, until_it_fails, until_it_waits
from torch import distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

from evenstep.core.errors import ConfigError, MismatchError, PeerError, SilenceError
from evenstep.distributed.work import DONE


@pytest.fixture
def alone():
    dist.init_process_group("evenstep", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def options(**values: object) -> AllreduceOptions:
    found = AllreduceOptions()
    for name, value in {"asyncOp": False, **values}.items():
        setattr(found, name, value)
    return found


@pytest.mark.usefixtures("alone")
def test_a_sum_takes_the_short_way_when_it_was_done_once():
    group = dist.group.WORLD
    at_once = group._sums.all_reduce
    assert at_once([torch.ones(3)], options()) is None
    assert group.allreduce([torch.ones(3)], options()) is DONE
    assert at_once([torch.ones(3)], options()) is DONE
    assert group.allreduce([torch.ones(3)], options()) is DONE
    assert at_once([torch.ones(4)], options()) is None
    assert at_once([torch.ones(3, dtype=torch.float64)], options()) is None
    assert at_once([torch.nn.Parameter(torch.ones(3))], options()) is DONE
    assert at_once([torch.ones(3).as_subclass(OfSomebodysOwn)], options()) is None


class OfSomebodysOwn(torch.Tensor):
    """A tensor whose memory need not be what it stands for."""


def test_the_short_way_adds_the_memory_that_the_tensor_shows():
    def body(rank):
        for _ in range(3):
            whole = torch.arange(12.0).view(4, 3) * (rank + 1)
            dist.all_reduce(whole[1:2])  # begins inside the memory
            dist.all_reduce(whole[2:, :1].t()[:, :1])  # strides of one item mean nothing
            expected = torch.arange(12.0).view(4, 3) * (rank + 1)
            expected[1], expected[2, 0] = torch.arange(3.0, 6.0) * 3, 6.0 * 3
            assert torch.equal(whole, expected)

    run_ranks(2, body)


UNUSUAL = {
    "another reduction": ([torch.ones(2, 3)], options(reduceOp=dist.ReduceOp.MAX)),
    "a timeout of its own": ([torch.ones(2, 3)], options(timeout=timedelta(seconds=5))),
    "an asynchronous one": ([torch.ones(2, 3)], options(asyncOp=True)),
    "no options": ([torch.ones(2, 3)], None),
    "several tensors": ([torch.ones(2, 3), torch.ones(2, 3)], options()),
    "a transposed tensor": ([torch.ones(3, 2).t()], options()),
    "a sparse tensor": ([torch.ones(2, 3).to_sparse()], options()),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_not_as_usual_does_not(name):
    group = dist.group.WORLD
    group.allreduce([torch.ones(2, 3)], options())
    tensors, opts = UNUSUAL[name]
    assert group._sums.all_reduce(tensors, opts) is None
    group.allreduce(tensors, opts).wait()
    assert torch.equal(tensors[0].to_dense(), torch.ones(2, 3))


@pytest.mark.usefixtures("alone")
def test_nor_does_anything_while_another_operation_is_open_or_a_profiler_looks():
    group = dist.group.WORLD
    group.allreduce([torch.ones(3)], options())
    turn = group._progress.turn
    turn.opened()
    assert group._sums.all_reduce([torch.ones(3)], options()) is None
    turn.over()
    assert turn.take()
    assert group._sums.all_reduce([torch.ones(3)], options()) is None
    turn.leave()
    with torch.profiler.profile():
        assert group._sums.all_reduce([torch.ones(3)], options()) is None
    assert group._sums.all_reduce([torch.ones(3)], options()) is DONE


@pytest.mark.usefixtures("alone")
def test_a_forked_copy_takes_no_turn():
    group = dist.group.WORLD
    group.allreduce([torch.ones(3)], options())
    child = os.fork()
    if child == 0:
        short = group._sums.all_reduce([torch.ones(3)], options())
        try:
            dist.all_reduce(torch.ones(3))
        except ConfigError:
            os._exit(0 if short is None else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("alone")
def test_sums_of_sizes_that_are_never_the_same_twice_are_forgotten():
    group = dist.group.WORLD
    for size in range(4100):
        group._sums.learn(torch.empty(size + 1), b"all_reduce", 0, 0, size + 1)
    assert group._sums.all_reduce([torch.ones(5)], options()) is None
    assert group._sums.all_reduce([torch.ones(4099)], options()) is DONE


def test_a_destroyed_group_does_none():
    dist.init_process_group("evenstep", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    group.allreduce([torch.ones(3)], options())
    dist.destroy_process_group()
    assert group._sums.all_reduce([torch.ones(3)], options()) is None
    with pytest.raises(ConfigError, match="destroyed this process group before it started all_reduce"):
        group.allreduce([torch.ones(3)], options())


def known_sum() -> None:
    dist.all_reduce(torch.ones(3))


def elsewhere() -> None:
    with pytest.raises(MismatchError):
        dist.barrier()


WHERE = r"all_reduce\(SUM, float32, \[3\]\), operation 3 of the group"
FAILURES = {
    "ended": (lambda: os._exit(0), PeerError, rf"rank 1 .* ended; rank 0 .* waits for it in {WHERE}"),
    "left": (dist.destroy_process_group, PeerError, rf"rank 1 .* left the group; rank 0 .* waits for it in {WHERE}"),
    "silent": (
        until_it_fails,
        SilenceError,
        rf"rank 1 .* said nothing for 0.3 s: Timed out at rank 0 .* {WHERE}",
    ),
    "elsewhere": (elsewhere, MismatchError, rf"is at ({WHERE}|barrier).* is at ({WHERE}|barrier)"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_known_sum_that_fails_says_what_any_operation_says(name):
    other, kind, expected = FAILURES[name]

    def body(rank):
        known_sum()
        known_sum()
        if rank == 1:
            other()
            os._exit(0)
        dist.group.WORLD.set_timeout(timedelta(seconds=0.3 if name == "silent" else 30))
        with pytest.raises(kind) as caught:
            known_sum()
        assert re.search(expected, str(caught.value)), caught.value

    assert run_rank_outcomes(2, body)[0].kind is None


def test_a_known_sum_that_is_interrupted_tells_the_others():
    def body(rank):
        pids = [None] * 2
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        dist.all_gather_object(pids, os.getpid())
        known_sum()
        if rank == 0:
            with pytest.raises(KeyboardInterrupt):
                known_sum()
        else:
            until_it_waits(0, [1])
            os.kill(pids[0], signal.SIGALRM)
            with pytest.raises(PeerError, match=r"rank 0 .* was interrupted in all_reduce.*KeyboardInterrupt"):
                dist.recv(torch.empty(1), 0)

    run_ranks(2, body)
