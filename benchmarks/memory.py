"""The memory that parameters and optimizer state take on 1, 2 and 4 workers, against one plain process.

Run it by itself (``python benchmarks/memory.py``) or through ``make bench``. Each configuration trains the MLP of
12.6 M parameters with AdamW for a few steps on small batches, drops its gradients and parks; then the script reads
``/proc``. The same with a model of 144 parameters is subtracted, so that the interpreter, torch and the launcher do not
count. The plain process is measured in the same way (144 MiB by count: parameters and two moments); every ratio divides
by it.

Three measures:

``state``, with the goal of at most 2.2 times the plain process
    Parameters and optimizer state: what the workers share (resident bytes of the segments named ``memfd:evenstep``,
    each counted once) less the gradients in there, plus what a worker keeps outside of them.
``gradients``
    What the workers' gradients take in the segments. Every kind of data-parallel training has them once per worker; a
    plain process that keeps its gradients has 48 MiB.
``everything``
    The proportional set size (``smaps_rollup``) summed over every process of the run, launcher included. Memory that
    the allocator holds back would blur it, so all sides run with a fixed malloc threshold and trim before they park.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine import (
    BenchmarkError,
    exit_on_sigterm,
    single_threaded_environment,
    started,
    wait_until,
)
from models import TASKS, adamw
from results import AGAINST_PEERS, Record, add_option

GOAL = 2.2
WORKERS = (1, 2, 4)
NUM_STEPS = 4
BATCH_SIZE = 32
SEGMENT = "/memfd:evenstep"
PARK_S = 60.0
MIB = 2**20
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)\s*(.*)$")


@dataclass(frozen=True)
class Usage:
    """What one run held while it was parked.

    Attributes:
        state_bytes: The shared segments and the parameters and optimizer state outside of them.
        gradient_bytes: The gradients in the shared segments.
        total_bytes: The proportional set size of all its processes.
    """

    state_bytes: int
    gradient_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Mapping:
    """One mapping of a shared segment into a process, from ``/proc/<pid>/smaps``."""

    start: int
    end: int
    inode: int
    resident_bytes: int


def segment_mappings(pid: int | str) -> list[Mapping]:
    """Return where and how far the shared segments of evenstep are mapped in process `pid`."""
    mappings: list[Mapping] = []
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if header := MAPPING.match(line):
            inside = header[4].startswith(SEGMENT)
            if inside:
                mappings.append(Mapping(int(header[1], 16), int(header[2], 16), int(header[3]), 0))
        elif inside and line.startswith("Rss:"):
            last = mappings[-1]
            mappings[-1] = Mapping(last.start, last.end, last.inode, int(line.split()[1]) * 1024)
    return mappings


def segment_bytes(pids: Iterable[int]) -> int:
    """Return the resident bytes of the shared segments that `pids` hold, each segment counted once.

    The file behind a segment knows its allocated blocks exactly. Where no process keeps it open, the largest resident
    size among the processes stands in for it, which misses pages that this process did not touch.
    """
    by_mapping: dict[int, int] = {}
    by_file: dict[int, int] = {}
    for pid in pids:
        here: dict[int, int] = {}
        for mapping in segment_mappings(pid):
            here[mapping.inode] = here.get(mapping.inode, 0) + mapping.resident_bytes
        for inode, resident in here.items():
            by_mapping[inode] = max(by_mapping.get(inode, 0), resident)
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link).startswith(SEGMENT):
                stat = link.stat()
                by_file[stat.st_ino] = stat.st_blocks * 512
    return sum({**by_mapping, **by_file}.values())


def proportional_bytes(pid: int) -> int:
    """Return the proportional set size of process `pid`."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError(f"/proc/{pid}/smaps_rollup has no line 'Pss:'")


def process_tree(root: int) -> set[int]:
    """Return `root` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting += children.get(pid, [])
    return found


def measure(num_workers: int, task: str, timeout_s: float) -> Usage:
    """Train `task` on `num_workers` workers of evenstep (0: one plain process) and measure it while it is parked.

    Raises:
        BenchmarkError: A process failed or the workers were not parked within `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="evenstep-memory-") as folder:
        parked = Path(folder) / "parked"
        parked.mkdir()
        launcher = ["-m", "evenstep", "run", "-n", str(num_workers)] if num_workers > 1 else []
        side = "plain" if num_workers == 0 else "ours"
        command = [sys.executable, *launcher, str(Path(__file__).resolve()), "--train", side, "--model", task]
        environment = single_threaded_environment(MALLOC_MMAP_THRESHOLD_="65536")
        count = max(1, num_workers)
        with started([[*command, "--parked", str(parked)]], [environment], Path(folder)) as processes:
            wait_until(lambda: len(list(parked.glob("*.json"))) == count, processes, timeout_s, Path(folder))
            usage = read_usage(processes[0], parked)
            (parked / "release").touch()
            wait_until(lambda: processes[0].poll() == 0, processes, timeout_s, Path(folder))
        return usage


def read_usage(process: subprocess.Popen[bytes], parked: Path) -> Usage:
    """Read from ``/proc`` what the parked run of `process` holds."""
    reports = [json.loads(report.read_text()) for report in parked.glob("*.json")]
    pids = process_tree(process.pid) | {report["pid"] for report in reports}
    gradients = sum(report["gradient_bytes"] for report in reports)
    return Usage(
        state_bytes=segment_bytes(pids) - gradients + sum(report["private_bytes"] for report in reports),
        gradient_bytes=gradients,
        total_bytes=sum(proportional_bytes(pid) for pid in pids),
    )


def park(name: str, model: nn.Module, optimizer: Any, folder: Path, gradient_bytes: int = 0) -> None:
    """Drop the gradients, tell the driver that this worker is ready, and block until it says so or `PARK_S` passed.

    Every worker calls it with a `name` of its own. The report holds the bytes of parameters and optimizer state that
    are not in a shared segment.
    """
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    tensors: list[Tensor] = list(model.parameters())
    for state in getattr(optimizer, "state", {}).values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    shared = segment_mappings("self")
    private = {
        tensor.data_ptr(): tensor.nbytes
        for tensor in tensors
        if not any(mapping.start <= tensor.data_ptr() < mapping.end for mapping in shared)
    }
    report = folder / f"{name}.part"
    report.write_text(
        json.dumps({"pid": os.getpid(), "private_bytes": sum(private.values()), "gradient_bytes": gradient_bytes})
    )
    report.rename(folder / f"{name}.json")
    deadline = time.monotonic() + PARK_S
    while not (folder / "release").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def train_plain(task_name: str, parked: Path) -> None:
    """Train with plain PyTorch and park."""
    task = TASKS[task_name]
    torch.set_num_threads(1)
    model = task.model()
    optimizer = adamw(model.parameters())
    tensors = task.dataset(NUM_STEPS * BATCH_SIZE).tensors
    for batch in torch.randperm(NUM_STEPS * BATCH_SIZE).view(NUM_STEPS, BATCH_SIZE):
        optimizer.zero_grad()
        task.loss(model, tuple(tensor[batch] for tensor in tensors)).backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
    park("plain", model, optimizer, parked)


def train_ours(task_name: str, parked: Path) -> None:
    """Train with evenstep and park."""
    import evenstep  # only here: the plain process must not pay for it, and must run where evenstep is not built

    task = TASKS[task_name]
    model = task.model()
    optimizer = adamw(model.parameters())
    dataset = task.dataset(NUM_STEPS * BATCH_SIZE)
    with evenstep.Run(shards=8, seed=0, quiet=True, threads=1) as run:
        model, optimizer = run.prepare(model, optimizer)
        for batch in run.batches(dataset, batch_size=BATCH_SIZE, epochs=1):
            run.step(batch, lambda part: task.loss(model, part))
        gradient_bytes = getattr(run._engine.optimizers[0].gradients.delivery, "shared_bytes", 0)
        park(f"worker-{run.worker}", model, optimizer, parked, gradient_bytes)


def table_lines(plain: Usage, usages: dict[int, Usage | None]) -> list[list[str]]:
    """Return the cells of the table, two lines a number of workers."""
    lines: list[list[str]] = []
    for num_workers, usage in usages.items():
        for counted, ours, peer, goal in (
            ("state", None if usage is None else usage.state_bytes, plain.state_bytes, GOAL),
            ("gradients", None if usage is None else usage.gradient_bytes, plain.gradient_bytes, None),
            ("everything", None if usage is None else usage.total_bytes, plain.total_bytes, None),
        ):
            what = f"{num_workers} workers, {counted}" if num_workers > 1 else f"1 worker, {counted}"
            ratio = None if ours is None or not peer else ours / peer
            cells = ["failed" if ours is None else f"{ours / MIB:.1f}", f"{peer / MIB:.1f}"]
            cells += ["-" if ratio is None else f"{ratio:.3f}", "-" if goal is None else f"{goal:.2f}"]
            reached = "-" if goal is None or ratio is None else "yes" if ratio <= goal else "no"
            lines.append([what, *cells, reached])
    return lines


def growth(num_workers: int, timeout_s: float) -> Usage:
    """Return what the MLP takes on `num_workers` workers (0: one plain process) beyond the tiny model.

    Raises:
        BenchmarkError: One of the two runs failed.
    """
    large, tiny = (measure(num_workers, task, timeout_s) for task in ("mlp", "tiny"))
    return Usage(
        large.state_bytes - tiny.state_bytes,
        large.gradient_bytes - tiny.gradient_bytes,
        large.total_bytes - tiny.total_bytes,
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Measure the memory of parameters and optimizer state.")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds one run may take (default: 120)")
    add_option(parser)
    parser.add_argument("--train", choices=("ours", "plain"), help="be a measured process (internal)")
    parser.add_argument("--model", choices=sorted(TASKS), default="mlp", help="what --train trains (internal)")
    parser.add_argument("--parked", type=Path, help="where --train reports that it is parked (internal)")
    options = parser.parse_args()
    if options.train and options.parked is None:
        parser.error("--train needs --parked")
    return options


def main() -> int:
    """Measure and print the table; return 1 where a run failed, else 0."""
    options = parse_arguments()
    if options.train:
        (train_ours if options.train == "ours" else train_plain)(options.model, options.parked)
        return 0
    exit_on_sigterm()
    record = Record.begin()
    plain = growth(0, options.timeout)
    usages: dict[int, Usage | None] = {}
    for num_workers in WORKERS:
        try:
            usages[num_workers] = growth(num_workers, options.timeout)
        except BenchmarkError as error:
            usages[num_workers] = None
            print(f"{num_workers} workers: failed: {error}", file=sys.stderr, flush=True)
    columns = ("MLP 12.6 M, AdamW", "ours MiB", "plain MiB", "ratio", "goal", "reached")
    chart = {**AGAINST_PEERS, "labels": columns[:1], "means": "times as much as one plain process"}
    record.table(columns, table_lines(plain, usages), **chart)
    record.save(options.json)
    return 1 if None in usages.values() else 0


if __name__ == "__main__":
    sys.exit(main())
