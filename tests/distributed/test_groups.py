"""Groups come and go: sub-groups, several at once, again in one process, in forks and spawns, two jobs at a time."""

import threading
from datetime import timedelta
from multiprocessing import resource_tracker

import pytest
import torch
from ranks import run_ranks, same, values
from spawned import sum_many_times
from torch import distributed as dist
from torch import multiprocessing

import leaks
import processes
from evenstep.core.errors import MismatchError, SilenceError
from workers import run_workers


def test_sub_groups_of_all_kinds_work_beside_each_other():
    def body(rank):
        groups = {ranks: dist.new_group(ranks) for ranks in [(0, 1), (1, 2), (0, 2), (0, 1, 2), (1,)]}
        for turn in range(20):
            for ranks, group in groups.items():
                if rank in ranks:
                    mine = values((100 * turn,), torch.float32, rank)
                    dist.all_reduce(mine, group=group)
                    parts = [values((100 * turn,), torch.float32, other) for other in ranks]
                    expected = parts[0] if len(parts) == 1 else parts[0] + parts[1]
                    assert same(mine, expected if len(parts) < 3 else expected + parts[2]), ranks
                    dist.broadcast(mine, ranks[-1], group=group)

    run_ranks(3, body)


def test_an_error_in_a_sub_group_names_ranks_as_the_user_knows_them():
    def body(rank):
        group = dist.new_group([1, 2])
        if rank > 0:
            with pytest.raises(MismatchError, match=r"rank [12] \(pid .*rank [12] \(pid"):
                dist.all_reduce(torch.ones(2 + rank), group=group)
        dist.barrier()  # other groups go on

    run_ranks(3, body)


def test_a_process_inits_and_destroys_again_and_again_and_leaves_nothing(tmp_path):
    def body(rank):
        for turn in range(4):
            with leaks.nothing_left_behind():
                store = dist.FileStore(str(tmp_path / f"store{turn}"), 2)
                dist.init_process_group("evenstep", store=store, rank=rank, world_size=2)
                group = dist.new_group([0, 1])
                mine = torch.ones(100_000)
                dist.all_reduce(mine, async_op=True, group=group).wait()
                dist.isend(mine, 1 - rank)
                dist.recv(mine, 1 - rank)
                dist.destroy_process_group(group)
                dist.all_reduce(mine)
                dist.destroy_process_group()
                del group

    run_workers(2, body)


def test_a_group_that_is_never_destroyed_goes_with_its_process(tmp_path):
    def body(rank):
        dist.init_process_group("evenstep", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        dist.all_reduce(torch.ones(10), async_op=True).wait()

    run_workers(2, body)


def test_a_store_in_one_process_serves_threads_as_ranks():
    store = dist.HashStore()
    found = {}

    def body(rank):
        from evenstep.distributed.process_group import EvenstepProcessGroup
        from evenstep.distributed.ranks import meet

        group = EvenstepProcessGroup(meet(dist.PrefixStore("x", store), rank, range(2), 20.0), rank, 2, 20.0)
        mine = torch.full((50_000,), float(rank + 1))
        group.allreduce([mine]).wait()
        found[rank] = mine
        group.shutdown()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[rank], torch.full((50_000,), 3.0)) for rank in range(2))


def test_spawned_and_forked_ranks_of_two_jobs_at_a_time(tmp_path):
    """The spawned ones are fresh, so they see what importing the backend does: register it, and nothing else."""
    jobs = {}
    for method in ("spawn", "fork"):
        (tmp_path / method).mkdir()
        where = (processes.free_port(), tmp_path / method)
        jobs[method] = multiprocessing.start_processes(sum_many_times, where, 2, join=False, start_method=method)
    for job in jobs.values():
        while not job.join(timeout=100):
            pass
    said = {method: [path.read_text() for path in (tmp_path / method).iterdir()] for method in jobs}
    assert said == {"spawn": ["fresh"] * 2, "fork": ["forked"] * 2}
    resource_tracker._resource_tracker._stop()  # that of the spawned ones


def test_a_rank_that_does_not_come_to_a_new_group_is_named(tmp_path):
    def body(_):
        before, store = processes.memfds(), dist.FileStore(str(tmp_path / "store"), 2)
        with pytest.raises(SilenceError, match="rank 1 of the new group did not come"):
            dist.init_process_group("evenstep", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.3))
        assert processes.memfds() == before

    run_workers(1, body)
