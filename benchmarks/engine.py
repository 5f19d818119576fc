"""The speed of the engine against its peers: every row of the table of goals, as ratios from one run on one machine.

Run it by itself (``python benchmarks/engine.py``) or through ``make bench``. Rules that keep the ratios honest:

- Every configuration runs in processes of its own, each with one thread, ours and the peer alike.
- A round measures all configurations of a model one after the other (A B C, A B C, ...), so that drift of the machine
  meets both sides of a ratio. A figure is the median over rounds of the median over steps; a ratio divides two of them.
- A step is the whole body of the training loop: fetching the batch, forward, backward, update. The peers fetch theirs
  by indexing tensors with a permutation, so that no data loader slows them down.
- A configuration that fails is reported as failed and makes the exit code 1; a goal that is missed does not.

The peers live here too: ``--peer plain``, ``--peer ddp`` and ``--peer gloo`` turn this script into one process of them.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.arithmetic.settings import PORTABLE
from models import TASKS, Task
from results import AGAINST_PEERS, Record, add_option

HERE = Path(__file__).resolve().parent
NUM_WARMUP_STEPS = 3
MAX_BATCHES = 32  # a longer measurement goes through the data set again, so that its size stays bounded
EXCHANGE_FLOATS = 256
NUM_EXCHANGES = 2000
DDP_SETTINGS: dict[str, dict[str, Any]] = {
    "stock": {},  # what a user gets who only wraps the model
    "tuned": {"gradient_as_bucket_view": True, "broadcast_buffers": False},  # fewer copies, no broadcast of statistics
}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class BenchmarkError(Exception):
    """A measured process failed or ran out of time; the message ends with its last lines of output."""


@dataclass(frozen=True)
class Config:
    """One thing to measure: a kind of training on a number of workers, or a kind of exchange.

    Attributes:
        name: The name in progress lines and in the JSON file.
        kind: ``ours``, ``plain`` or ``ddp`` for a training step; ``exchange``, ``recorded`` or ``gloo`` for a small
            exchange.
        task: The name of the task in `models.TASKS`; empty for an exchange.
        num_workers: How many processes run it.
        shards: The number of shards, for our side.
        arithmetic: ``native`` or ``portable``, for our side.
    """

    name: str
    kind: str
    task: str = ""
    num_workers: int = 1
    shards: int = 8
    arithmetic: str = "native"


@dataclass(frozen=True)
class Row:
    """One row of the table: `ours` may take at most `goal` (if any) times as long as `peer`, both configurations."""

    name: str
    what: str
    ours: str
    peer: str
    goal: float | None


CONFIGS = (
    Config("mlp-ours-2w-2s", "ours", "mlp", 2, 2),
    Config("mlp-ddp-2w", "ddp", "mlp", 2),
    Config("mlp-ours-2w-8s", "ours", "mlp", 2, 8),
    Config("mlp-ours-1w-8s", "ours", "mlp", 1, 8),
    Config("mlp-portable-1w-8s", "ours", "mlp", 1, 8, "portable"),
    Config("resnet-ours-2w-8s", "ours", "resnet", 2, 8),
    Config("resnet-ddp-2w", "ddp", "resnet", 2),
    Config("resnet-ours-1w-8s", "ours", "resnet", 1, 8),
    Config("resnet-portable-1w-8s", "ours", "resnet", 1, 8, "portable"),
    Config("resnet-plain", "plain", "resnet"),
    Config("transformer-ours-2w-8s", "ours", "transformer", 2, 8),
    Config("transformer-ddp-2w", "ddp", "transformer", 2),
    Config("transformer-ours-1w-8s", "ours", "transformer", 1, 8),
    Config("transformer-portable-1w-8s", "ours", "transformer", 1, 8, "portable"),
    Config("transformer-plain", "plain", "transformer"),
    Config("exchange-ours-2w", "exchange", "", 2, 2),
    Config("exchange-recorded-2w", "recorded", "", 2, 2),
    Config("exchange-gloo-2w", "gloo", "", 2),
)

ROWS = (
    Row("mlp-2-shards", "MLP 12.6 M, 2 workers, 2 shards / DDP", "mlp-ours-2w-2s", "mlp-ddp-2w", 0.7),
    Row("mlp-8-shards", "MLP 12.6 M, 2 workers, 8 shards / DDP", "mlp-ours-2w-8s", "mlp-ddp-2w", 1.2),
    Row("resnet-ddp", "ResNet, 2 workers, sync BN / DDP, local BN", "resnet-ours-2w-8s", "resnet-ddp-2w", 1.0),
    Row("transformer-ddp", "transformer, 2 workers / DDP", "transformer-ours-2w-8s", "transformer-ddp-2w", 0.95),
    Row("resnet-plain", "ResNet, 1 worker, 8 shards / plain loop", "resnet-ours-1w-8s", "resnet-plain", 1.10),
    Row(
        "transformer-plain",
        "transformer, 1 worker, 8 shards / plain loop",
        "transformer-ours-1w-8s",
        "transformer-plain",
        1.10,
    ),
    Row("mlp-portable", "MLP, portable / native arithmetic", "mlp-portable-1w-8s", "mlp-ours-1w-8s", 1.10),
    Row("resnet-portable", "ResNet, portable / native", "resnet-portable-1w-8s", "resnet-ours-1w-8s", 1.10),
    Row(
        "transformer-portable",
        "transformer, portable / native",
        "transformer-portable-1w-8s",
        "transformer-ours-1w-8s",
        1.10,
    ),
    Row("resnet-scaling", "ResNet, 2 workers / 1 worker", "resnet-ours-2w-8s", "resnet-ours-1w-8s", 0.55),
    Row("exchange", "exchange of 1 KiB, 2 workers / gloo all_reduce", "exchange-ours-2w", "exchange-gloo-2w", 0.02),
    Row("recorded", "the same by run.exchange, recorded", "exchange-recorded-2w", "exchange-gloo-2w", None),
)


def single_threaded_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment with every thread pool pinned to one thread and `extra` on top."""
    return {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), **extra}


@contextmanager
def started(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], log_dir: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start one process a command, each leading a group of its own, and end every group when the block is left.

    Standard output and error of process ``i`` go to ``log_dir/i.log``. Leaving the block takes up to 5 s where a
    process does not react to SIGTERM; then its group is killed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            with (log_dir / f"{index}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 5.0
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(
    done: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], timeout_s: float, log_dir: Path
) -> None:
    """Block until `done` returns true.

    Raises:
        BenchmarkError: A process exited with another code than 0, or `timeout_s` passed.
    """
    deadline = time.monotonic() + timeout_s
    while not done():
        for index, process in enumerate(processes):
            if process.poll() not in (None, 0):
                raise BenchmarkError(f"process {index} exited with {process.returncode}{tail(log_dir, index)}")
        if time.monotonic() > deadline:
            index = next((i for i, process in enumerate(processes) if process.poll() is None), 0)
            raise BenchmarkError(f"not done after {timeout_s:.0f} s; raise --timeout{tail(log_dir, index)}")
        time.sleep(0.02)


def tail(log_dir: Path, index: int, lines: int = 15) -> str:
    """Return the last lines that process `index` wrote, indented, with a line break before each."""
    text = (log_dir / f"{index}.log").read_text(errors="replace").rstrip().splitlines()
    return "".join(f"\n    {line}" for line in text[-lines:])


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def commands_of(
    config: Config, steps: int, out: Path, ddp: str, clock: str
) -> tuple[list[list[str]], list[dict[str, str]]]:
    """Return the command lines that measure `config`, one a process to start, and the environment of each."""
    measured = ["--out", str(out), "--steps", str(steps)]
    if config.kind in ("ours", "exchange", "recorded"):
        script = "train_ours.py" if config.kind == "ours" else "exchange_ours.py"
        launcher = [] if config.num_workers == 1 else ["-m", "evenstep", "run", "-n", str(config.num_workers)]
        trained = ["--model", config.task, "--shards", str(config.shards), "--clock", clock]
        which = trained if config.kind == "ours" else []
        which = ["--recorded"] if config.kind == "recorded" else which
        chosen = PORTABLE if config.arithmetic == "portable" else {}
        environment = single_threaded_environment(EVENSTEP_ARITHMETIC=config.arithmetic, **chosen)
        return [[sys.executable, *launcher, str(HERE / script), *which, *measured]], [environment]
    which = ["--model", config.task, "--ddp", ddp] if config.task else []
    command = [sys.executable, str(HERE / "engine.py"), "--peer", config.kind, "--clock", clock, *which, *measured]
    if config.kind == "plain":
        return [command], [single_threaded_environment()]
    group = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(config.num_workers),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [single_threaded_environment(**group, RANK=str(rank)) for rank in range(config.num_workers)]
    return [command] * config.num_workers, ranks


def measure(config: Config, steps: int | None, timeout_s: float, ddp: str, clock: str) -> float:
    """Run `config` once (DDP with the settings `ddp`); return the median time in seconds, by the `clock`.

    Raises:
        BenchmarkError: A process failed or the whole took longer than `timeout_s`.
    """
    if steps is None or not config.task:
        steps = TASKS[config.task].steps if config.task else NUM_EXCHANGES
    with tempfile.TemporaryDirectory(prefix="evenstep-bench-") as folder:
        out = Path(folder) / "times.json"
        commands, environments = commands_of(config, steps, out, ddp, clock)
        with started(commands, environments, Path(folder)) as processes:
            wait_until(lambda: all(p.poll() == 0 for p in processes), processes, timeout_s, Path(folder))
        if not out.exists():
            raise BenchmarkError(f"it ended well but wrote no times{tail(Path(folder), 0)}")
        times: list[float] = json.loads(out.read_text())
        return statistics.median(times)


def peer_times(task: Task, steps: int, ddp: str | None, clock: Callable[[], float]) -> list[float]:
    """Train `task` with plain PyTorch, as one process or as one rank of DDP, and return the time of each timed step.

    All ranks of the process group must call it. Each rank takes its own part of every global batch.

    Args:
        task: What to train.
        steps: How many steps to time after the warm-up.
        ddp: The name of the settings of DDP in `DDP_SETTINGS`; None for one process without DDP.
        clock: What tells the time in seconds.
    """
    rank, num_ranks = (0, 1) if ddp is None else (dist.get_rank(), dist.get_world_size())
    total = NUM_WARMUP_STEPS + steps
    num_batches = min(total, MAX_BATCHES)
    tensors = task.dataset(num_batches * task.batch_size).tensors
    model: nn.Module = task.model()
    if ddp is not None:
        model = DistributedDataParallel(model, **DDP_SETTINGS[ddp])
    optimizer = task.optimizer(model.parameters())
    order = torch.Generator().manual_seed(0)
    permutation: Tensor = torch.empty(0, dtype=torch.int64)
    times: list[float] = []
    before = clock()
    for step in range(total):
        if step % num_batches == 0:
            permutation = torch.randperm(num_batches * task.batch_size, generator=order)
        batch = permutation.view(num_batches, num_ranks, -1)[step % num_batches, rank]
        part = tuple(tensor[batch] for tensor in tensors)
        optimizer.zero_grad()
        task.loss(model, part).backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
        optimizer.step()
        now = clock()
        times.append(now - before)
        before = now
    return times[NUM_WARMUP_STEPS:]


def all_reduce_times(calls: int) -> list[float]:
    """Time `calls` calls of all_reduce on 1 KiB after a tenth as many to warm up; all ranks must call it."""
    vector = torch.ones(EXCHANGE_FLOATS)
    times: list[float] = []
    for _ in range(calls // 10 + calls):
        before = time.perf_counter()
        dist.all_reduce(vector)
        times.append(time.perf_counter() - before)
        vector.fill_(1.0)
    return times[calls // 10 :]


def run_peer(options: argparse.Namespace) -> None:
    """Be one process of the peer `options.peer`; rank 0 writes the times in seconds as a JSON list."""
    torch.set_num_threads(1)
    task = TASKS[options.model]
    clock = time.process_time if options.clock == "processor" else time.perf_counter
    if options.peer == "plain":
        options.out.write_text(json.dumps(peer_times(task, options.steps, None, clock)))
        return
    dist.init_process_group("gloo", init_method="env://")
    try:
        gloo = options.peer == "gloo"
        times = all_reduce_times(options.steps) if gloo else peer_times(task, options.steps, options.ddp, clock)
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(times))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_rounds(rows: Sequence[Row], options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure every configuration that `rows` need, `options.rounds` times, and return the medians in seconds by name.

    The rounds of one model follow each other directly. A configuration that failed is not tried again and is missing
    from the result.
    """
    needed = {name for row in rows for name in (row.ours, row.peer)}
    results: dict[str, list[float]] = {}
    failed: set[str] = set()
    for task in dict.fromkeys(config.task for config in CONFIGS):
        group = [config for config in CONFIGS if config.task == task and config.name in needed]
        for round_number in range(1, options.rounds + 1):
            for config in group:
                if config.name in failed:
                    continue
                label = f"round {round_number}/{options.rounds}  {config.name}"
                try:
                    seconds = measure(config, options.steps, options.timeout, options.ddp, options.clock)
                except BenchmarkError as error:
                    failed.add(config.name)
                    print(f"{label}: failed: {error}", file=sys.stderr, flush=True)
                    continue
                results.setdefault(config.name, []).append(seconds)
                print(f"{label}: {milliseconds(seconds)} ms", file=sys.stderr, flush=True)
    return {name: times for name, times in results.items() if name not in failed}


def milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds with about three significant digits."""
    value = seconds * 1000
    return f"{value:.1f}" if value >= 10 else f"{value:.4f}"


def table_line(row: Row, results: dict[str, list[float]]) -> list[str]:
    """Return the cells of `row`: what, ours, peer, ratio, goal, reached."""
    goal = "-" if row.goal is None else f"{row.goal:.2f}"
    ours, peer = (statistics.median(results[n]) if n in results else None for n in (row.ours, row.peer))
    cells = ["failed" if seconds is None else milliseconds(seconds) for seconds in (ours, peer)]
    if ours is None or peer is None:
        return [row.what, *cells, "-", goal, "failed"]
    ratio = ours / peer
    reached = "-" if row.goal is None else "yes" if ratio <= row.goal else "no"
    return [row.what, *cells, f"{ratio:.3f}", goal, reached]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line; an unknown row name is an error that lists the known ones."""
    parser = argparse.ArgumentParser(description="Measure the engine against its peers.")
    names = [row.name for row in ROWS]
    usual = [name for name in names if not name.endswith("-portable")]
    parser.add_argument(
        "--rows",
        default=",".join(usual),
        help="rows, separated by commas (default: all but those of portable arithmetic)",
    )
    parser.add_argument("--steps", type=int, help="timed steps in one measurement (default: a few seconds' worth)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of every configuration (default: 3)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds one measurement may take (default: 120)")
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: count only the time that it works for us (rows of one worker), on a machine that others use "
        "(default: wall)",
    )
    add_option(parser)
    parser.add_argument("--ddp", choices=sorted(DDP_SETTINGS), default="stock", help="settings of DDP (default: stock)")
    parser.add_argument("--peer", choices=("plain", "ddp", "gloo"), help="be one process of a peer (internal)")
    parser.add_argument("--model", choices=sorted(TASKS), default="mlp", help="what --peer trains (internal)")
    parser.add_argument("--out", type=Path, help="where --peer writes its times (internal)")
    options = parser.parse_args()
    unknown = sorted(set(options.rows.split(",")) - set(names))
    if unknown:
        parser.error(f"unknown rows: {', '.join(unknown)}; known: {', '.join(names)}")
    alone = {config.name for config in CONFIGS if config.num_workers == 1 and config.task}
    others = [row.name for row in ROWS if row.name in options.rows.split(",") and not {row.ours, row.peer} <= alone]
    if options.clock == "processor" and others and not options.peer:
        parser.error(
            f"--clock processor knows nothing of waiting, so it is for one worker; leave out {', '.join(others)}"
        )
    if options.rounds < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--rounds and --steps must be at least 1")
    if options.peer and (options.out is None or options.steps is None):
        parser.error("--peer needs --out and --steps")
    return options


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that the blocks that end our processes are left properly."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, leave)


def main() -> int:
    """Measure and print the table; return 1 where a configuration failed, else 0."""
    options = parse_arguments()
    if options.peer:
        run_peer(options)
        return 0
    exit_on_sigterm()
    record = Record.begin()
    began = time.monotonic()
    wanted = options.rows.split(",")
    rows = [row for row in ROWS if row.name in wanted]
    results = run_rounds(rows, options)
    lines = [table_line(row, results) for row in rows]
    record.table(("what", "ours ms", "peer ms", "ratio", "goal", "reached"), lines, **AGAINST_PEERS)
    record.machine |= {"threads per process": "1", "settings of DDP": options.ddp, "clock": options.clock}
    record.machine["rounds"] = str(options.rounds)
    record.machine["duration"] = f"{time.monotonic() - began:.0f} s"
    record.save(options.json)
    return 1 if any(line[5] == "failed" for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
