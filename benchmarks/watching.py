"""What it costs to look at a run: a trace of it, its page when nobody looks, and when somebody does.

Run it by itself (``python benchmarks/watching.py``) or through ``make bench``. Every other step of a traced run notes
nothing, so steps of the same run are compared; what the supervisor and the page take beside the workers is read from
the kernel's accounts of their time on processors, so that it does not matter what else the machine does.
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
from pathlib import Path

from evenstep.core.control import ask
from evenstep.core.errors import ConfigError
from models import TASKS
from results import Record, add_option

GOALS = (3.0, 0.01, 1.0)  # percent: of a trace, of a page at which nobody looks, of one at which somebody does
NUM_WARMUP_STEPS = 4
WORKERS = 2


def train(name: str, found: Path) -> None:
    """Be a worker: do steps until it is enough, and write down what they took, with and without notes."""
    import evenstep

    task = TASKS[name]
    times: dict[bool, list[float]] = {False: [], True: []}
    with evenstep.Run(seed=0, quiet=True) as run:
        model = task.model()
        model, _ = run.prepare(model, task.optimizer(model.parameters()))
        tracer = run._ledger.group.tracer
        traced = tracer.on
        for number, batch in enumerate(run.batches(task.dataset(8 * task.batch_size), task.batch_size, epochs=10**6)):
            tracer.on = traced and number % 2 == 0
            before = time.process_time()
            run.step(batch, lambda part: task.loss(model, part))
            if number >= NUM_WARMUP_STEPS:
                times[tracer.on].append(time.process_time() - before)
            if number % 8 == 7 and run.once((found / "enough").exists):
                break
        tracer.on = traced
    (found / str(run.worker)).write_text(json.dumps({"plain": times[False], "traced": times[True]}))


def processor_s(pid: int) -> float:
    """How long the threads of a process have been on processors."""
    spent = 0.0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            spent += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return spent


def children(pid: int) -> list[int]:
    """The processes that one has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def under_way(pid: int) -> bool:
    """Whether all workers of a run are there, and its first steps over."""
    try:
        workers = ask({"status": True}, pid)["workers"]
    except ConfigError:
        return False
    return len(workers) == WORKERS and all(worker["step"] >= NUM_WARMUP_STEPS for worker in workers)


def measure(name: str, seconds: float, option: str | None, *, look: bool = False) -> dict[str, float]:
    """Shares of the workers' time on processors, in percent: of notes, the supervisor and the page."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"trace": ["--trace", f"{folder}/trace.json"], "page": ["--page"], None: []}[option]
        command = [sys.executable, "-m", "evenstep", "run", "-n", str(WORKERS), *options, __file__]
        command += ["--train", name, "--found", folder]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None, "it was asked for"
            page = re.search(r"page (\S+),", process.stderr.readline()) if option == "page" else None
            while not under_way(process.pid):
                time.sleep(0.2)
            known = {pid: processor_s(pid) for pid in (process.pid, *children(process.pid))}
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if look and page is not None:
                    urllib.request.urlopen(f"{page[1]}/status").read()
                time.sleep(1.0)
            spent = {pid: processor_s(pid) - before for pid, before in known.items()}
            (Path(folder) / "enough").touch()
            process.communicate()
        each = [json.loads((Path(folder) / str(worker)).read_text()) for worker in range(WORKERS)]
    times = {kind: [took_s for worker in each for took_s in worker[kind]] for kind in ("plain", "traced")}
    steps = {kind: statistics.median(took) for kind, took in times.items() if took}
    supervisor, *others = spent.values()
    workers = sorted(others)[-WORKERS:]
    notes = steps["traced"] - steps["plain"] if "traced" in steps else 0.0
    return {
        "step_ms": 1e3 * steps["plain"],
        "notes": 100 * notes / steps["plain"],
        "supervisor": 100 * supervisor / sum(workers),
        "page": 100 * (sum(others) - sum(workers)) / sum(workers),
    }


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
        plain = measure(name, options.seconds, None)
        trace = measure(name, options.seconds, "trace")
        unseen = measure(name, options.seconds, "page")
        seen = measure(name, options.seconds, "page", look=True)
        writing, answering = (max(each["supervisor"] - plain["supervisor"], 0.0) for each in (trace, seen))
        costs = (max(trace["notes"], 0.0) + writing, unseen["page"], seen["page"] + answering)
        good &= all(cost <= goal for cost, goal in zip(costs, GOALS, strict=True))
        figures = (plain["supervisor"], trace["notes"], writing, *costs)
        lines.append([name, f"{plain['step_ms']:.1f}", *(f"{figure:.2f}" for figure in figures)])
    shares = ["without either", "notes", "writing them", "--trace", "--page, unseen", "--page, looked at"]
    columns = ["task", "step ms", *(f"{share}, %" for share in shares)]
    record.table(columns, lines, values=columns[5:], labels=["task"], means="% of processor time", base=None)
    record.note(
        f"Goals: a trace at most {GOALS[0]:g} %, a page nothing if nobody looks and {GOALS[2]:g} % if somebody does: "
        f"{'reached' if good else 'not reached'}."
    )
    record.save(options.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
