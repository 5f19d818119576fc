"""What it costs to look at a run: a trace of it, its page when nobody looks, and when someone does.

Run it by itself (``python benchmarks/watching.py``) or through ``make bench``. What workers spend on notes is how many
of them a step leaves, times what one takes there; what the supervisor and the page spend is read from the kernel's
accounts of their time on processors. So it does not matter what else the machine does.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep.core.control import ask
from evenstep.core.errors import ConfigError
from models import TASKS
from results import Record, add_option

GOALS = (3.0, 0.01, 1.0)  # percent: of a trace, of a page at which nobody looks, of one at which somebody does
NUM_WARMUP_STEPS = 4
NUM_NOTES = 5000
WORKERS = 2


def train(name: str, found: Path) -> None:
    """Be a worker: do steps until it is enough, and write down what one took, and what its notes did."""
    import evenstep
    from evenstep.exchange.tracing import Kind

    task, times, note_s, notes = TASKS[name], [], 0.0, 0
    with evenstep.Run(seed=0, quiet=True) as run:
        model = task.model()
        model, _ = run.prepare(model, task.optimizer(model.parameters()))
        tracer = run._ledger.group.tracer
        if tracer.on:
            before = time.thread_time()
            for _ in range(NUM_NOTES):
                with tracer.span(Kind.EXCHANGE, "step 100: layer1.0.bn1 call 0 forward"):
                    pass
            note_s = (time.thread_time() - before) / NUM_NOTES
            time.sleep(0.5)  # they are collected
        note = tracer.note

        def counted(*words: Any, **named: Any) -> None:
            nonlocal notes
            notes += 1
            note(*words, **named)

        tracer.note = counted  # type: ignore[method-assign]  # for this measurement
        for number, batch in enumerate(run.batches(task.dataset(8 * task.batch_size), task.batch_size, epochs=10**6)):
            before = time.process_time()
            run.step(batch, lambda part: task.loss(model, part))
            times.append(time.process_time() - before)
            if number % 8 == 7 and run.once((found / "enough").exists):
                break
    step_s = statistics.median(times[NUM_WARMUP_STEPS:])
    (found / str(run.worker)).write_text(json.dumps({"step_s": step_s, "notes_s": note_s * notes / len(times)}))


def processor_s(pid: int) -> float:
    """How long the threads of a process have been on processors."""
    spent = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            spent += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return spent


@dataclass(frozen=True)
class Phase:
    """What the processes of a run spent on processors in some seconds."""

    seconds: float
    supervisor: float
    workers: float
    page: float


class Running:
    """A run of two workers. A context manager.

    Args:
        task: What they train.
        options: Of `evenstep run`.
    """

    def __init__(self, task: str, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name)
        command = [sys.executable, "-m", "evenstep", "run", "-n", str(WORKERS), *options]
        command += ["--trace", f"{self._path}/trace.json"] if options else []
        command += [__file__, "--train", task, "--found", str(self._path)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None, "it was asked for"
        said = re.search(r"page (\S+),", self._process.stderr.readline()) if options else None
        self._page = said[1] if said else None
        while (workers := self._workers()) is None:
            time.sleep(0.2)
        self._workers_now = workers

    def _workers(self) -> list[int] | None:
        """The workers, when all are there, and the first steps over."""
        try:
            found = ask({"status": True}, self._process.pid)["workers"]
        except ConfigError:
            return None
        ready = len(found) == WORKERS and all(worker["step"] >= NUM_WARMUP_STEPS for worker in found)
        return [worker["pid"] for worker in found] if ready else None

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()
        self._folder.cleanup()

    def look(self) -> None:
        """Look at the page once."""
        urllib.request.urlopen(f"{self._page}/status").read()

    def spend(self, seconds: float, *, look: bool = False) -> Phase:
        """Let it go on for a while; somebody may look once a second."""
        supervisor = self._process.pid
        children = map(int, Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split())
        pids, begin = [supervisor, *children], time.monotonic()
        before = {pid: processor_s(pid) for pid in pids}
        while time.monotonic() < begin + seconds:
            if look:
                self.look()
            time.sleep(1.0)
        spent = {pid: processor_s(pid) - before[pid] for pid in pids}
        mine, theirs = spent.pop(supervisor), sum(spent.pop(pid) for pid in self._workers_now)
        return Phase(time.monotonic() - begin, mine, theirs, sum(spent.values()))

    def end(self) -> list[dict[str, float]]:
        """Let it end; returns what the workers have written down."""
        (self._path / "enough").touch()
        self._process.communicate()
        return [json.loads((self._path / str(worker)).read_text()) for worker in range(WORKERS)]


def measure(task: str, seconds: float) -> tuple[float, ...]:
    """Milliseconds of a step; and in percent: notes, writing them, a page unseen and looked at."""
    with Running(task) as plain:
        idle = plain.spend(seconds)
    with Running(task, "--page") as run:
        unseen = run.spend(seconds)
        run.look()
        seen = run.spend(seconds, look=True)
        workers = run.end()
    rate = unseen.supervisor / unseen.seconds
    writing = (rate - idle.supervisor / idle.seconds) * unseen.seconds / unseen.workers
    answering = seen.supervisor / seen.seconds - rate
    looked_at = (seen.page / seen.seconds + max(answering, 0.0)) / WORKERS  # of workers that never wait for a processor
    step_s = statistics.mean(worker["step_s"] for worker in workers)
    notes = statistics.mean(worker["notes_s"] for worker in workers) / step_s
    shares = (notes, max(writing, 0.0), unseen.page / unseen.workers, looked_at)
    return (1e3 * step_s, *(100 * share for share in shares))


def main() -> int:
    """Measure all tasks; 1 if one costs more than it may."""
    parser = argparse.ArgumentParser(description="What looking at a run costs.")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each measurement (default: 8)")
    parser.add_argument("--tasks", default="mlp,resnet,transformer", help="which (default: mlp,resnet,transformer)")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    add_option(parser)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.found)
        return 0
    record = Record.begin()
    lines, good = [], True
    for name in options.tasks.split(","):
        step_ms, notes, writing, unseen, seen = measure(name, options.seconds)
        costs = (notes + writing, unseen, seen)
        good &= all(cost <= goal for cost, goal in zip(costs, GOALS, strict=True))
        lines.append([name, f"{step_ms:.1f}", *(f"{figure:.2f}" for figure in (notes, writing, *costs))])
    columns = [
        "task",
        "step ms",
        "notes, %",
        "writing them, %",
        "--trace, %",
        "--page, unseen, %",
        "--page, looked at, %",
    ]
    record.table(columns, lines, values=columns[4:], labels=["task"], means="% of processor time", base=None)
    record.note(
        f"Goals: a trace at most {GOALS[0]:g} %, a page nothing if nobody looks and {GOALS[2]:g} % if somebody does "
        f"once a second: {'reached' if good else 'not reached'}."
    )
    record.save(options.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
