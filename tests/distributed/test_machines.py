"""Ranks that share no memory: failure between them, and two network namespaces as two machines."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from textwrap import dedent

import pytest
import torch
from ranks import pretend, run_rank_outcomes, run_ranks, same, values
from torch import distributed as dist

import processes
from evenstep.core.errors import MismatchError, PeerError, SilenceError
from workers import run_outcomes


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


def test_a_rank_that_stops_on_one_machine_is_noticed_on_the_other():
    def body(rank):
        pids = [None] * 4
        dist.all_gather_object(pids, os.getpid())
        dist.group.WORLD.set_timeout(timedelta(seconds=3))
        if rank == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        assert rank > 0 or processes.until(lambda: processes.is_stopped(pids[3]))
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


def test_a_store_that_answers_no_more_holds_nobody_up():
    """Its process is the one that is missed, and so nobody can leave word there that it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def body(rank):
        pretend(lambda number: number, rank)
        dist.init_process_group("evenstep", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
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
        assert processes.until(lambda: any("sleep" in line for line in processes.descendants(holder.pid).values()))
        (inside,) = processes.descendants(holder.pid)
        yield inside
    finally:
        processes.kill_tree(holder.pid)
        holder.wait()


SCRIPT = """
    import os, sys
    import torch
    import torch.distributed as dist
    import evenstep.distributed
    torch.set_num_threads(1)
    second = os.fork()
    os.environ["RANK"] = str(2 * int(sys.argv[1]) + (second == 0))
    dist.init_process_group("evenstep")
    rank = dist.get_rank()
    mine = torch.arange(50_000.0) / 7 + rank / 3
    dist.all_reduce(mine)
    parts = [torch.arange(50_000.0) / 7 + other / 3 for other in range(4)]
    assert torch.equal(mine, (parts[0] + parts[1]) + (parts[2] + parts[3]))
    found = [None] * 4
    dist.all_gather_object(found, rank)
    assert found == [0, 1, 2, 3]
    ranks = dist.group.WORLD._ranks
    sys.stdout.write(f"{type(ranks).__name__} {len(ranks._team.members)}\\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    if second:
        assert os.waitpid(second, 0)[1] == 0
"""


@pytest.mark.skipif(not namespaces_can_be_made(), reason="namespaces can be made by root only")
def test_two_network_namespaces_are_two_machines(tmp_path):
    """They have process namespaces of their own too: else they would share memory, and find out that they do."""
    script = tmp_path / "job.py"
    script.write_text(dedent(SCRIPT))
    names = [f"es{os.getpid()}{end}" for end in "ab"]  # until they are moved they are everybody's

    @contextlib.contextmanager
    def two_ranks(number: int, inside: int) -> Iterator[subprocess.Popen]:
        variables = {"WORLD_SIZE": "4", "MASTER_ADDR": "10.77.31.1", "MASTER_PORT": "29417"}
        variables["GLOO_SOCKET_IFNAME"] = names[number]
        command = ["nsenter", "-t", str(inside), "-n", "-p", "-m", sys.executable, str(script), str(number)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env={**os.environ, **variables}, text=True, **pipes) as started:
            try:
                yield started
            finally:
                processes.kill_tree(started.pid)

    with machine() as first, machine() as second, contextlib.ExitStack() as undo:
        subprocess.run(["ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1]], check=True)
        for number, inside in enumerate((first, second)):
            subprocess.run(["ip", "link", "set", names[number], "netns", str(inside)], check=True)
            enter = ["nsenter", "-t", str(inside), "-n", "ip"]
            subprocess.run([*enter, "addr", "add", f"10.77.31.{number + 1}/24", "dev", names[number]], check=True)
            subprocess.run([*enter, "link", "set", names[number], "up"], check=True)
            subprocess.run([*enter, "link", "set", "lo", "up"], check=True)
        ranks = [undo.enter_context(two_ranks(*place)) for place in enumerate((first, second))]
        for each in ranks:
            out, err = each.communicate(timeout=100)
            assert each.returncode == 0, err
            assert out == 2 * "Machines 2\n", out
