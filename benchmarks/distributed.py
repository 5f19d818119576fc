"""The backend `evenstep` of torch.distributed against gloo and, where mpi4py is installed, Open MPI: as ratios.

Run it by itself (``python benchmarks/distributed.py``) or through ``make bench``. Rules that keep the ratios honest:

- All peers run in the same processes, each with one thread, and take turns: a round times a block of calls of each on
  the same tensor (ours, gloo, MPI, ours, ...). A figure is the median over rounds of the median over a block's calls,
  small ones timed by tens (of two ranks that share a core, each call that waits is followed by one that need not).
- A call is what a user of torch writes: `torch.distributed.all_reduce(tensor)`, and `comm.Allreduce` on the memory of a
  tensor (`tensor.numpy()`). Between blocks all ranks meet.
- Where each rank can have a core of its own it keeps one while small all-reduces are timed, as Open MPI has it:
  of two ranks on one core either waits for the other's Python, and what is measured is the scheduler. gloo's threads
  are free. Four ranks are measured too, also where there are fewer cores.
- What nobody could do without is measured in the same way, beside the rest: torch's own Python, which looks at the
  arguments before any backend is asked, and moving bytes from core to core without adding anything.
- A goal that is missed does not change the exit code; a run that fails does.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import evenstep.distributed  # registers the backend
from engine import exit_on_sigterm
from evenstep.distributed.work import DONE
from evenstep.native import core
from models import TASKS
from results import AGAINST_PEERS, Record, add_option

KIB, MIB = 1 << 10, 1 << 20
GOALS_GLOO = {256: 0.05, 4 * KIB: 0.05, 64 * KIB: 0.05, MIB: 0.10, 16 * MIB: 0.25, 100 * MIB: 0.25}
SMALL_BYTES = 64 * KIB
MOVING_GOAL = 0.3
DDP_GOAL = 0.75
NOTICE_GOAL_MS = 100.0
SHARES = {
    "torch": "torch's Python alone: the same call, of a group that does nothing",
    "core": "the C core alone: no torch, no Python around it",
    "bare": "writing the bytes where the other rank reads them, and reading its own: nothing added",
    "ours": "all of it",
    "mpi": "Open MPI through mpi4py, all of it",
    "gloo": "gloo, all of it",
}
Times = dict[str, dict[str, list[float]]]  # of each operation, of each peer: a call in each round, in seconds


def size_name(num_bytes: int) -> str:
    """A size in words."""
    return (
        f"{num_bytes // MIB} MiB"
        if num_bytes >= MIB
        else f"{num_bytes // KIB} KiB"
        if num_bytes >= KIB
        else f"{num_bytes} B"
    )


def num_calls(num_bytes: int) -> int:
    """How many calls a block has: some tens of milliseconds' worth, at least 3."""
    return max(3, min(200, 32 * MIB // max(num_bytes, 1)))


class Nothing(dist.ProcessGroup):
    """A group whose all_reduce returns at once."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Do nothing."""
        return DONE


class Rank:
    """One rank of the measurement; all ranks do the same."""

    def __init__(self, rounds: int, mpi: Any, folder: Path) -> None:
        self.rounds = rounds
        self.mpi = mpi
        self.folder = folder
        self.times: Times = {}
        self.gloo = dist.new_group(backend="gloo")

    def compare(self, name: str, calls: int, **peers: Callable[[], Any]) -> None:
        """Time blocks of calls of each peer in turn; the first block of each is a warm-up."""
        found = self.times.setdefault(name, {peer: [] for peer in peers})
        at_once = 10 if calls >= 100 else 1
        for number in range(self.rounds + 1):
            for peer, call in peers.items():
                dist.barrier()
                block = []
                for _ in range(calls // at_once):
                    before = time.perf_counter()
                    for _ in range(at_once):
                        call()
                    block.append((time.perf_counter() - before) / at_once)
                if number:
                    found[peer].append(statistics.median(block))

    def all_reduces(self) -> None:
        """Time all_reduce at every size."""
        for num_bytes in GOALS_GLOO:
            tensor = torch.zeros(num_bytes // 4)
            peers: dict[str, Callable[[], Any]] = {
                "ours": lambda tensor=tensor: dist.all_reduce(tensor),
                "gloo": lambda tensor=tensor: dist.all_reduce(tensor, group=self.gloo),
            }
            if self.mpi is not None:
                peers["mpi"] = self.by_mpi(tensor)
            with bound() if num_bytes <= SMALL_BYTES else nullcontext():
                self.compare(f"all_reduce {size_name(num_bytes)}", num_calls(num_bytes), **peers)

    def by_mpi(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """The all_reduce of mpi4py."""
        world, in_place = self.mpi.COMM_WORLD, self.mpi.IN_PLACE
        return lambda: world.Allreduce(in_place, tensor.numpy())

    def shares(self) -> None:
        """Time what takes long: of a small all_reduce the words around it, of a larger one moving."""
        small, large = torch.zeros(KIB), torch.zeros(MIB // 4)
        nothing = Nothing(dist.get_rank(), dist.get_world_size())
        peers: dict[str, Callable[[], Any]] = {
            "torch": lambda: dist.all_reduce(small, group=nothing),
            "core": self.by_core(small),
            "ours": lambda: dist.all_reduce(small),
        }
        more: dict[str, Callable[[], Any]] = {
            "bare": self.moved(large),
            "core": self.by_core(large),
            "ours": lambda: dist.all_reduce(large),
            "gloo": lambda: dist.all_reduce(large, group=self.gloo),
        }
        if self.mpi is not None:
            peers["mpi"] = self.by_mpi(small)
        with bound():
            self.compare("shares 4 KiB", num_calls(4 * KIB), **peers)
        self.compare("shares 1 MiB", num_calls(MIB), **more)

    def by_core(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """The sum in the C core, as the process group calls it."""
        team, address = dist.group.WORLD._ranks.team.core, tensor.data_ptr()  # type: ignore[union-attr]
        call = (core.ES_ALL_REDUCE, b"a sum", 0, 0, 0, tensor.numel(), address, address, 10**11)
        return lambda: team.collective(*call)

    def moved(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """Moving a tensor to the other rank and its own here, through memory that both can see."""
        rank, num_items = dist.get_rank(), tensor.numel()
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            names: list[Any] = [None, None]
            dist.all_gather_object(names, file.name)
            there = [torch.from_file(name, shared=True, size=num_items) for name in names]
            dist.barrier()

        def move() -> None:
            there[rank].copy_(tensor)
            dist.barrier()
            tensor.copy_(there[1 - rank])
            dist.barrier()

        return move

    def moving(self) -> None:
        """Time the collectives that move 16 MiB."""
        size = dist.get_world_size()
        part, whole = torch.ones(4 * MIB), torch.ones(size * 4 * MIB)
        calls = {
            "broadcast 16 MiB": lambda group: dist.broadcast(part, 0, group=group),
            "all_gather 16 MiB": lambda group: dist.all_gather(list(whole.chunk(size)), part, group=group),
            "reduce_scatter 16 MiB": lambda group: dist.reduce_scatter(part, list(whole.chunk(size)), group=group),
        }
        for name, call in calls.items():
            self.compare(name, 3, ours=lambda call=call: call(None), gloo=lambda call=call: call(self.gloo))

    def training(self) -> None:
        """Time a step of DDP on each backend."""
        task, rank, size = TASKS["mlp"], dist.get_rank(), dist.get_world_size()
        part = tuple(each.chunk(size)[rank] for each in task.dataset(task.batch_size).tensors)

        def step_on(group: Any) -> Callable[[], None]:
            model = DistributedDataParallel(task.model(), process_group=group)
            optimizer = task.optimizer(model.parameters())

            def step() -> None:
                optimizer.zero_grad()
                task.loss(model, part).backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
                optimizer.step()

            return step

        self.compare("DDP step, MLP of 12.6 M parameters", 5, ours=step_on(None), gloo=step_on(self.gloo))


def be_rank(options: argparse.Namespace) -> None:
    """Be one rank: measure everything; rank 0 writes the times."""
    torch.set_num_threads(1)
    mpi = None
    if options.mpi:
        from mpi4py import MPI as mpi  # not everybody has it

        rank, size = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    else:
        rank, size = options.rank, options.ranks
    dist.init_process_group("evenstep", store=dist.FileStore(str(options.store), size), rank=rank, world_size=size)
    measured = Rank(options.rounds, mpi, options.store.parent)
    measured.all_reduces()
    if size == 2:
        measured.shares()
        measured.moving()
        measured.training()
    if rank == 0:
        options.out.write_text(json.dumps(measured.times))
    dist.destroy_process_group()


@contextmanager
def bound() -> Iterator[None]:
    """While this is open, the calling thread of each rank keeps a core of its own, if there are as many."""
    cores = sorted(os.sched_getaffinity(0))
    if dist.get_world_size() <= len(cores):
        os.sched_setaffinity(0, {cores[dist.get_rank()]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def commands(options: argparse.Namespace, ranks: int, folder: Path) -> list[list[str]]:
    """The commands that start the ranks: one each, or one for all through MPI."""
    me = [sys.executable, __file__, "--store", str(folder / "store"), "--out", str(folder / "out"), "--rounds"]
    me += [str(options.rounds), "--ranks", str(ranks)]
    mpirun = mpirun_path()
    if mpirun is None:
        return [[*me, "--rank", str(rank)] for rank in range(ranks)]
    return [[mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *me, "--rank", "0", "--mpi"]]


def mpirun_path() -> str | None:
    """Where Open MPI's launcher is, if mpi4py can be imported too."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@contextmanager
def started(lines: list[list[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes, each a group of its own, that are gone afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen(line, env=environment, start_new_session=True) for line in lines]
    try:
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(options: argparse.Namespace, ranks: int) -> Times:
    """Start this many ranks and return what they measured.

    Raises:
        SystemExit: A rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="evenstep-bench-") as name:
        folder = Path(name)
        with started(commands(options, ranks, folder)) as running:
            codes = [process.wait(options.timeout) for process in running]
        if any(codes):
            raise SystemExit(f"a rank of {ranks} failed: exit codes {codes}")
        times: Times = json.loads((folder / "out").read_text())
        return times


def notice_ms(repetitions: int = 5) -> float:
    """How long a rank takes to notice that another one was killed, in milliseconds: the median."""
    found = []
    for _ in range(repetitions):
        with tempfile.TemporaryDirectory(prefix="evenstep-bench-") as name:
            path, (reading, writing) = str(Path(name) / "store"), os.pipe()
            victim = os.fork()
            if victim == 0:
                dist.init_process_group("evenstep", store=dist.FileStore(path, 2), rank=1, world_size=2)
                os.write(writing, b"x")
                signal.pause()
            waiter = os.fork()
            if waiter == 0:
                dist.init_process_group("evenstep", store=dist.FileStore(path, 2), rank=0, world_size=2)
                try:
                    dist.barrier()
                except evenstep.PeerError:
                    os.write(writing, json.dumps(time.monotonic()).encode())
                os._exit(0)
            os.read(reading, 1)
            time.sleep(0.2)  # the other one waits in the barrier by now
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            found.append((json.loads(os.read(reading, 100)) - killed) * 1000)
            for pid in (victim, waiter):
                os.waitpid(pid, 0)
            os.close(reading)
            os.close(writing)
    return statistics.median(found)


def table(times: dict[int, Times]) -> list[list[str]]:
    """The lines of the table: what, ours, peer, ratio, goal, reached."""
    lines = []
    for ranks, operations in times.items():
        for name, peers in operations.items():
            if name.startswith("shares"):
                continue
            ours = statistics.median(peers["ours"])
            for peer in ("gloo", "mpi"):
                if peer not in peers:
                    continue
                theirs = statistics.median(peers[peer])
                goal = goal_of(name, ranks, peer)
                cells = [f"{name}, {ranks} ranks, {'Open MPI' if peer == 'mpi' else peer}"]
                cells += [f"{ours * 1e3:.4f}", f"{theirs * 1e3:.4f}", f"{ours / theirs:.3f}"]
                cells += ["-", "-"] if goal is None else [f"{goal:.2f}", "yes" if ours / theirs <= goal else "no"]
                lines.append(cells)
    return lines


def shares(times: Times) -> list[list[str]]:
    """The lines of the table of parts: what, how long."""
    return [
        [f"all_reduce {name.removeprefix('shares ')}: {SHARES[share]}", f"{statistics.median(found) * 1e3:.4f}"]
        for name, parts in times.items()
        if name.startswith("shares")
        for share, found in parts.items()
    ]


def goal_of(name: str, ranks: int, peer: str) -> float | None:
    """The goal for a ratio, if there is one."""
    if peer == "mpi":
        return None if name == f"all_reduce {size_name(256)}" else 1.0
    if ranks != 2:
        return None
    if name.startswith("DDP"):
        return DDP_GOAL
    goals = {f"all_reduce {size_name(num_bytes)}": goal for num_bytes, goal in GOALS_GLOO.items()}
    return goals.get(name, MOVING_GOAL)


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Measure the torch.distributed backend against its peers.")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of calls of each peer (default: 5)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the ranks may take (default: 300)")
    add_option(parser)
    parser.add_argument("--rank", type=int, help="be this rank (internal)")
    parser.add_argument("--ranks", type=int, help="of how many (internal)")
    parser.add_argument("--store", type=Path, help="where the ranks meet (internal)")
    parser.add_argument("--out", type=Path, help="where rank 0 writes its times (internal)")
    parser.add_argument("--mpi", action="store_true", help="measure MPI too, which started this rank (internal)")
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options)
        return 0
    exit_on_sigterm()
    record = Record.begin()
    times = {ranks: measure(options, ranks) for ranks in (2, 4)}
    record.table(("what", "ours ms", "peer ms", "ratio", "goal", "reached"), table(times), **AGAINST_PEERS)
    record.table(("what, 2 ranks", "ms"), shares(times[2]), title="What all-reduces consist of")
    record.note(f"A killed rank is noticed after {notice_ms():.0f} ms (goal: {NOTICE_GOAL_MS:.0f} ms).")
    if not mpirun_path():
        record.note("Open MPI is not installed: pip install evenstep[bench].")
    record.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
