"""Operations that run while the rank does something else, and messages."""

import threading
import time
from datetime import timedelta

import pytest
import torch
from ranks import run_ranks, same, values
from torch import distributed as dist

from evenstep.core.errors import SilenceError


def test_an_operation_goes_on_while_its_rank_computes():
    def body(rank):
        mine = torch.full((100_000,), float(rank))
        if rank == 0:
            work = dist.all_reduce(mine, async_op=True)
            assert not work.is_completed()
            with pytest.raises(SilenceError, match="all_reduce"):
                work.wait(timedelta(seconds=0.05))
            dist.barrier(group=others)  # the other rank starts only now
            while not work.is_completed():  # it completes without being waited for
                time.sleep(0.001)
            assert work.is_success()
        else:
            dist.barrier(group=others)
            work = dist.all_reduce(mine, async_op=True)
        work.wait()
        assert same(mine, torch.ones(100_000))
        assert work.exception() is None

    def with_group(rank):
        global others
        others = dist.new_group()
        body(rank)

    run_ranks(2, with_group)


def test_many_operations_in_flight_keep_their_order():
    def body(rank):
        tensors = [values((size,), torch.float32, rank) for size in (1, 50_000, 3, 400_000) * 8]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        last = torch.ones(5)
        dist.all_reduce(last)  # not asynchronous, but after the others
        assert all(work.is_completed() for work in works)
        parts = [[values(tensor.shape, torch.float32, other) for other in range(2)] for tensor in tensors]
        assert all(same(tensor, a + b) for tensor, (a, b) in zip(tensors, parts, strict=True))

    run_ranks(2, body)


def test_a_future_holds_the_tensors_and_runs_what_follows():
    def body(rank):
        mine = torch.ones(10)
        future = dist.all_reduce(mine, async_op=True).get_future()
        twice = future.then(lambda done: done.value()[0] * 2)
        assert same(twice.wait(), torch.full((10,), 4.0))
        work = dist.broadcast(mine, 0, async_op=True)
        work.wait()
        assert same(work.get_future().wait()[0], mine)

    run_ranks(2, body)


def test_threads_of_one_rank_may_use_different_groups_at_once():
    def body(rank):
        groups = [dist.new_group() for _ in range(3)]
        wrong = []

        def work(number):
            for turn in range(30):
                mine = torch.full((1000 * (number + 1),), float(turn + rank))
                dist.all_reduce(mine, group=groups[number])
                if not (mine == 2 * turn + 1).all():
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    run_ranks(2, body)


SIZES = [0, 1, 5, 70_000, 700_000]


def test_messages_of_every_size_arrive_in_order():
    def body(rank):
        for size in SIZES:
            for dtype in (torch.float32, torch.bool, torch.complex64):
                sent = [values((size,), dtype, seed) for seed in range(3)]
                if rank == 0:
                    for tensor in sent:
                        dist.send(tensor, 1)
                else:
                    for tensor in sent:
                        found = torch.empty(size, dtype=dtype)
                        assert dist.recv(found, 0) == 0
                        assert same(found, tensor)

    run_ranks(2, body)


def test_tags_may_be_received_in_any_order():
    def body(rank):
        sent = [values((size,), torch.float32, size) for size in (3, 300_000, 5, 100_000)]
        if rank == 0:
            for work in [dist.isend(tensor, 1, tag=tag) for tag, tensor in enumerate(sent)]:
                work.wait()
        else:
            for tag in (3, 0, 2, 1):
                found = torch.empty_like(sent[tag])
                dist.recv(found, 0, tag=tag)
                assert same(found, sent[tag])

    run_ranks(2, body)


def test_all_ranks_exchange_large_messages_at_once_with_a_collective_between():
    def body(rank):
        sent = [[values((200_000,), torch.float32, 10 * source + to) for to in range(3)] for source in range(3)]
        found = [torch.empty(200_000) for _ in range(3)]
        others = [other for other in range(3) if other != rank]
        works = [dist.isend(sent[rank][to], to) for to in others]
        dist.barrier()
        works += [dist.irecv(found[source], source) for source in others]
        for work in works:
            work.wait()
        assert all(same(found[source], sent[source][rank]) for source in others)
        operations = [dist.P2POp(dist.isend, sent[rank][to], to) for to in others]
        operations += [dist.P2POp(dist.irecv, found[source].zero_(), source) for source in others]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert all(same(found[source], sent[source][rank]) for source in others)

    run_ranks(3, body)


def test_a_message_from_any_source_says_where_it_came_from():
    def body(rank):
        if rank == 0:
            found = []
            for _ in range(4):
                tensor = torch.empty(2)
                source = dist.recv(tensor)
                assert tensor[0] == source
                found.append(tuple(tensor.int().tolist()))
            return sorted(found)
        for turn in range(2):
            dist.send(torch.tensor([float(rank), float(turn)]), 0)
        return None

    assert run_ranks(3, body)[0] == [(1, 0), (1, 1), (2, 0), (2, 1)]
