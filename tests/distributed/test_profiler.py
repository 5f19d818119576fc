"""What a profiler sees of operations: their names and sizes, as of torch's own backends."""

import pytest
import torch
from ranks import run_ranks
from torch import distributed as dist

ONE = torch.ones
OPERATIONS = {
    "all_reduce": ([[3, 4]], lambda **how: dist.all_reduce(ONE(3, 4), **how)),
    "reduce": ([[5]], lambda **how: dist.reduce(ONE(5), 0, **how)),
    "broadcast": ([[7]], lambda **how: dist.broadcast(ONE(7), 0, **how)),
    "all_gather": ([[2]], lambda **how: dist.all_gather([ONE(2), ONE(2)], ONE(2), **how)),
    "all_to_all": ([[1], [1]], lambda **how: dist.all_to_all([ONE(1), ONE(1)], [ONE(1), ONE(1)], **how)),
    "reduce_scatter": ([[6], [6]], lambda **how: dist.reduce_scatter(ONE(6), [ONE(6), ONE(6)], **how)),
    "barrier": ([], lambda **how: dist.barrier(**how)),
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_collective_is_recorded_with_the_sizes_of_what_it_was_given(asynchronous):
    def body(rank):
        for name, (shapes, operation) in OPERATIONS.items():
            operation()  # known by now, so that it could take a shorter way
            with torch.profiler.profile(record_shapes=True) as profile:
                work = operation(async_op=asynchronous)
                if asynchronous:
                    work.wait()
            (event,) = [event for event in profile.events() if event.name == f"evenstep:{name}"]
            assert event.input_shapes == shapes, name
            assert event.is_async, name

    run_ranks(2, body)


def test_so_is_every_message():
    def body(rank):
        with torch.profiler.profile(record_shapes=True) as profile:
            if rank == 0:
                dist.send(torch.ones(3), 1)
                dist.send(torch.ones(100_000), 1)
            else:
                dist.recv(torch.empty(3))
                dist.recv(torch.empty(100_000), 0)
        events = [event for event in profile.events() if event.name.startswith("evenstep:")]
        names = ["evenstep:send"] * 2 if rank == 0 else ["evenstep:recvAnySource", "evenstep:recv"]
        assert sorted(event.name for event in events) == sorted(names)
        assert sorted(event.input_shapes for event in events) == [[[3]], [[100_000]]]

    run_ranks(2, body)
