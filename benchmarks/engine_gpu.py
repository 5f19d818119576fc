"""The engine on a GPU against a plain loop: ms a step, host time and memory, as ratios from one run on one machine.

Run it on a machine with a GPU: ``python benchmarks/engine_gpu.py`` (``--help`` for less than all of it). Every
configuration runs in a process of its own, one after the other; the batch is on the device already, on both sides. A
figure is the mean over steps after the warm-up; memory is what torch has reserved then, and at its peak, when the
piece of a graph is also computed to compare them. The plain loop is one batch, forward, backward and update, with what
torch does by default; ours is ``run.step`` with everything that it promises.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch

import evenstep
from models_gpu import TASKS
from results import Record, add_option, shown

GOALS = {
    ("resnet50", 1): 0.90, ("resnet50", 2): 0.95, ("resnet50", 8): 1.20,
    ("gpt2", 1): 1.03, ("gpt2", 2): 1.06, ("gpt2", 8): 1.22,
}  # fmt: skip
SPANNING = {"resnet50"}  # its shards meet in batch norms, so they are one graph


def plain(name: str, steps: int, warmup: int) -> dict[str, Any]:
    """A plain loop."""
    task = TASKS[name]
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = task.model().cuda()
    optimizer, batch = task.optimizer(model.parameters()), task.batch("cuda")

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()

    return measure(step, steps, warmup)


def ours(name: str, shards: int, graphs: str, image: bool, steps: int, warmup: int) -> dict[str, Any]:
    """`run.step`."""
    task, options = TASKS[name], {"graphs": graphs != "off", "overlap": graphs == "overlap", "image": int(image)}
    with evenstep.Run(shards=shards, device="cuda", quiet=True, **options) as run:
        model = task.model()
        model, _ = run.prepare(model, task.optimizer(model.parameters()))
        batch = task.batch("cuda")
        found = measure(lambda: run.step(batch, lambda part: task.loss(model, part)), steps, warmup)
        return {**found, "fingerprint": run.fingerprint(), "worker": run.worker}


def measure(step: Any, steps: int, warmup: int) -> dict[str, Any]:
    """Times of a step: on the clock, and of it on the host (until the call returns, with the device kept busy)."""
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    times = []
    begin = before = time.perf_counter()
    busy = time.process_time()
    for _ in range(steps):
        step()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    host_s = time.process_time() - busy
    torch.cuda.synchronize()
    return {
        "ms": 1e3 * (time.perf_counter() - begin) / steps,
        "median_ms": 1e3 * statistics.median(times),
        "cpu_ms": 1e3 * host_s / steps,
        "gib": torch.cuda.memory_reserved() / 2**30,
        "peak_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def run_one(args: argparse.Namespace, workers: int = 1, **options: Any) -> dict[str, Any]:
    """Measure one configuration in processes of its own."""
    launcher = ["-m", "evenstep", "run", "-n", str(workers)]  # else there would be nobody to keep an image for
    launcher = launcher if options["kind"] == "ours" else []
    rest = ["--one", json.dumps(options), "--steps", str(args.steps), "--warmup", str(args.warmup)]
    command = [sys.executable, *launcher, str(Path(__file__)), *rest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]}
    sys.stderr.write(done.stderr)
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    return next(found for found in map(json.loads, lines) if not found.get("worker"))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="resnet50,gpt2")
    parser.add_argument("--shards", default="1,2,8")
    parser.add_argument("--graphs", default="on,overlap,off", help="overlap: those of two shards at the same time")
    parser.add_argument("--image", default="on,off", help="the state is copied to the host after every step, or never")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=12, help="until graphs are captured and checked")
    parser.add_argument("--workers", default="1,2", help="of one GPU; for more than one, MPS is started")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further configuration after this many")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    add_option(parser)
    args = parser.parse_args()
    if args.one:
        options = json.loads(args.one)
        kind = options.pop("kind")
        print(json.dumps((plain if kind == "plain" else ours)(steps=args.steps, warmup=args.warmup, **options)))
        return 0
    record = Record.begin()
    columns = ["model", "what", "ms", "ratio", "goal", "cpu ms", "GiB", "peak", "fingerprint"]
    chart = {"means": "times as long as the plain loop", "goal": "goal"}
    record.table(columns, shown(rows(args)), values=["ratio"], labels=columns[:2], **chart)
    record.save(args.json)
    return int(any("failed" in row for row in record.tables[0].rows))


def rows(args: argparse.Namespace) -> Iterator[list[str]]:
    """Measure one configuration after the other."""
    end = time.monotonic() + 60 * args.minutes
    names = args.models.split(",")
    plain_loops = {name: run_one(args, kind="plain", name=name) for name in names}
    for name, base in plain_loops.items():
        yield [name, "plain loop", *cells(base)]
    choices = names, map(int, args.shards.split(",")), args.graphs.split(","), args.image.split(",")
    configurations = list(product(*choices))
    for workers in map(int, args.workers.split(",")):
        with together() if workers > 1 else nullcontext():
            for name, shards, graphs, image in configurations:
                if workers > shards or (graphs, image) == ("off", "off") or time.monotonic() > end:
                    continue
                if graphs == "overlap" and (name in SPANNING or shards // workers < 2):
                    continue
                options = {"name": name, "shards": shards, "graphs": graphs, "image": image == "on"}
                found = run_one(args, workers, kind="ours", **options)
                goal = GOALS.get((name, shards)) if graphs != "off" and workers == 1 else None
                what = f"K={shards}, graphs {graphs}, image {image}, {workers} workers"
                yield [name, what, *cells(found, plain_loops[name], goal)]


@contextmanager
def together() -> Iterator[None]:
    """Let processes compute on one GPU at the same time, by MPS; without it they take turns."""
    begun = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, check=False).returncode == 0
    try:
        yield
    finally:
        if begun:  # and not somebody else's
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", capture_output=True, timeout=60, check=False)


def cells(found: dict[str, Any], base: dict[str, Any] | None = None, goal: float | None = None) -> list[str]:
    """The rest of a row."""
    if "error" in found:
        print(f"failed: {found['error']}", file=sys.stderr)
        return ["failed", *["-"] * 6]
    ratio = f"{found['ms'] / base['ms']:.3f}" if base and "ms" in base else "1"
    fingerprint = found.get("fingerprint", "")[:12]
    memory = [f"{found['gib']:.1f}", f"{found['peak_gib']:.1f}"]
    return [f"{found['ms']:.1f}", ratio, str(goal or "-"), f"{found['cpu_ms']:.1f}", *memory, fingerprint]


if __name__ == "__main__":
    sys.exit(main())
