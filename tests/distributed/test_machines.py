"""Ranks that share no memory: failure between them, and two network namespaces as two machines."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import traceback
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from ranks import pretend, run_rank_outcomes, run_ranks, same, values
from torch import distributed as dist

import processes
from evenstep.core.errors import MismatchError, PeerError, SilenceError
from evenstep.distributed.failures import Failures
from evenstep.distributed.machines import MachineRanks
from workers import run_outcomes, run_workers


def two_and_two(rank: int) -> int:
    return rank // 2


@pytest.mark.parametrize("culprit", [1, 2, 3])
def test_a_rank_that_is_killed_on_one_machine_is_named_on_the_other(culprit):
    def body(rank):
        pids = [None] * 4
        dist.all_gather_object(pids, os.getpid())
        if rank == culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerError) as caught:
            dist.all_reduce(torch.ones(1000))
        assert f"rank {culprit} (pid {pids[culprit]} on " in str(caught.value), str(caught.value)
        assert re.search(r"all_reduce\(SUM, float32, \[1000\]\), operation \d+ of the group", str(caught.value))

    found = run_rank_outcomes(4, body, machine_of=two_and_two)
    assert [outcome.kind for outcome in found] == ["Killed" if rank == culprit else None for rank in range(4)], found


def test_a_rank_that_stops_on_one_machine_is_noticed_on_the_other(monkeypatch):
    monkeypatch.setattr(Failures, "report_s", 10.0)  # the rank that knows which one it is may be late

    def body(rank):
        pids = [None] * 4
        dist.all_gather_object(pids, os.getpid())
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
        if rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        assert processes.until(lambda: processes.is_stopped(pids[3]))
        with pytest.raises(SilenceError) as caught:
            dist.barrier()
        assert f"rank 3 (pid {pids[3]} on " in str(caught.value), str(caught.value)
        if rank == 0:
            os.kill(pids[3], signal.SIGCONT)

    run_ranks(4, body, machine_of=two_and_two)


def test_machines_at_different_operations_all_get_both_sides():
    def body(rank):
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(3 + rank // 2))
        return str(caught.value)

    found = set(run_ranks(4, body, machine_of=two_and_two))
    assert len(found) == 1, found
    assert re.search(r"rank 0 .* is at all_reduce\(.*\[3\]\).*rank 2 .* is at all_reduce\(.*\[4\]\)", found.pop())


def test_messages_between_and_inside_machines():
    def body(rank):
        found = torch.empty(70_000)
        work = dist.isend(values((70_000,), torch.float32, rank), (rank + 1) % 4)
        dist.recv(found, (rank - 1) % 4)
        work.wait()
        assert same(found, values((70_000,), torch.float32, (rank - 1) % 4))

    run_ranks(4, body, machine_of=two_and_two)


@pytest.mark.parametrize(("end", "kind"), [(signal.SIGKILL, PeerError), (signal.SIGSTOP, SilenceError)])
def test_a_sender_on_another_machine_that_ends_in_its_message_is_named(end, kind):
    def body(rank):
        pids = [None] * 3
        dist.all_gather_object(pids, os.getpid())
        dist.group.WORLD.set_timeout(timedelta(seconds=1 if rank == 0 else 20))
        if rank == 2:
            dist.isend(torch.ones(3_000_000), 0)
            os.kill(os.getpid(), end)
            return
        assert processes.until(lambda: not processes.is_alive(pids[2]) or processes.is_stopped(pids[2]))
        with pytest.raises(kind) as caught:
            dist.recv(torch.empty(3_000_000), 2) if rank == 0 else dist.recv(torch.empty(3), 0)
        assert f"rank 2 (pid {pids[2]} on " in str(caught.value), str(caught.value)
        if rank == 1 and end == signal.SIGSTOP:
            os.kill(pids[2], signal.SIGCONT)

    found = run_rank_outcomes(3, body, machine_of=lambda rank: rank)
    assert [outcome.kind for outcome in found[:2]] == [None, None], found


def test_a_store_that_answers_no_more_holds_nobody_up(tmp_path):
    """Its process is the one that is missed, and so nobody can leave word there that it is."""

    def body(rank):
        pretend(lambda number: number, rank)
        where = dist.FileStore(str(tmp_path / "where"), 2)
        store = None
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            where.set("port", str(store.port))
        store = store or dist.TCPStore("127.0.0.1", int(where.get("port")), 2, is_master=False)
        dist.init_process_group("evenstep", store=store, rank=rank, world_size=2)
        pids = [None] * 2
        dist.all_gather_object(pids, os.getpid())
        dist.group.WORLD.set_timeout(timedelta(seconds=0.2))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            assert processes.until(lambda: processes.is_stopped(pids[0]))
            with pytest.raises(SilenceError, match=rf"rank 0 \(pid {pids[0]} on"):
                dist.all_reduce(torch.ones(3))
            os.kill(pids[0], signal.SIGCONT)
        dist.destroy_process_group()

    assert [outcome.kind for outcome in run_outcomes(2, body)] == [None, None]


def test_sub_groups_find_out_for_themselves_who_shares_memory():
    def body(rank):
        groups = {ranks: dist.new_group(ranks) for ranks in [(0, 1), (1, 2), (1, 2, 3)]}
        for ranks, group in groups.items():
            if rank in ranks:
                mine = torch.full((5,), float(rank))
                dist.all_reduce(mine, group=group)
                assert same(mine, torch.full((5,), float(sum(ranks))))
                assert len(group._ranks._team.members) == len({r for r in ranks if r // 2 == rank // 2})

    run_ranks(4, body, machine_of=two_and_two)


def namespaces_can_be_made() -> bool:
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    return tools and subprocess.run(["unshare", "-n", "-p", "-f", "--mount-proc", "true"], check=False).returncode == 0


@contextlib.contextmanager
def machine() -> Iterator[int]:
    """A process in a network, a process and a mount namespace of its own; gives its id out here."""
    holder = subprocess.Popen(["unshare", "-n", "-p", "-f", "--kill-child", "--mount-proc", "sleep", "100"])
    try:
        assert processes.until(lambda: list(processes.descendants(holder.pid).values()) == ["sleep 100"])
        (inside,) = processes.descendants(holder.pid)
        yield inside
    finally:
        processes.kill_tree(holder.pid)
        holder.wait()


def enter(process: int) -> None:
    """Go into the namespaces of a process: into that of its processes, the children of this one."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as undo:
        places = [undo.enter_context(open(f"/proc/{process}/ns/{kind}")) for kind in ("net", "pid", "mnt")]
        for place in places:
            assert libc.setns(place.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def be_one_of_four(rank: int) -> None:
    """Take part in a group of two machines."""
    os.environ["RANK"] = str(rank)
    dist.init_process_group("evenstep")
    mine = torch.arange(50_000.0) / 7 + rank / 3
    dist.all_reduce(mine)
    parts = [torch.arange(50_000.0) / 7 + other / 3 for other in range(4)]
    assert torch.equal(mine, (parts[0] + parts[1]) + (parts[2] + parts[3]))
    found = [None] * 4
    dist.all_gather_object(found, rank)
    assert found == [0, 1, 2, 3]
    ranks = dist.group.WORLD._ranks
    assert isinstance(ranks, MachineRanks)
    assert len(ranks._team.members) == 2
    dist.destroy_process_group()


@pytest.mark.skipif(not namespaces_can_be_made(), reason="namespaces can be made by root only")
def test_two_network_namespaces_are_two_machines():
    """They have process namespaces of their own too: else they would share memory, and find out that they do."""
    names = [f"es{os.getpid()}{end}" for end in "ab"]  # until they are moved they are everybody's

    def body(rank):
        number = rank // 2
        os.environ.update(WORLD_SIZE="4", MASTER_ADDR="10.77.31.1", MASTER_PORT="29417")
        os.environ["GLOO_SOCKET_IFNAME"] = names[number]
        enter(inside[number])
        child = os.fork()
        if child == 0:
            try:
                be_one_of_four(rank)
            except BaseException:  # noqa: BLE001  # the border of a process
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    with machine() as first, machine() as second:
        inside = (first, second)
        subprocess.run(["ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1]], check=True)
        for number, process in enumerate(inside):
            subprocess.run(["ip", "link", "set", names[number], "netns", str(process)], check=True)
            within = ["nsenter", "-t", str(process), "-n", "ip"]
            subprocess.run([*within, "addr", "add", f"10.77.31.{number + 1}/24", "dev", names[number]], check=True)
            subprocess.run([*within, "link", "set", names[number], "up"], check=True)
            subprocess.run([*within, "link", "set", "lo", "up"], check=True)
        run_workers(4, body)
