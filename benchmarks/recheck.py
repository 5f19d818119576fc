"""What it costs to compute one step in 100 twice, and to look after the state meanwhile.

Run it by itself (``python benchmarks/recheck.py``) or through ``make bench``. Every other step of a run on one worker
is rechecked; the processor time of those and of the others is measured apart, and that of a digest of the whole state,
of which a step that is rechecked takes three. From these come the shares of one step in 100. A run without recheck asks
once in a step whether it is due. With ``--device cuda`` the tasks are those of the GPU, and the time is that of the
clock, until the device has done its work.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

import evenstep
import models
import models_gpu
from results import Record, add_option

EVERY = 100
GOAL_STEPS, GOAL_STATE = 1.5, 0.5  # percent
NUM_WARMUP_STEPS = {"cpu": 2, "cuda": 16}  # on a GPU until graphs are captured and checked
DIGESTS_OF_STATE = 3


def measure(name: str, steps: int, device: str) -> tuple[float, float, float]:
    """Seconds of a step, of one that is rechecked, and of a digest of the state."""
    task, clock = (models_gpu if device == "cuda" else models).TASKS[name], CLOCKS[device]
    model = task.model()
    times: dict[bool, list[float]] = {False: [], True: []}
    with evenstep.Run(seed=0, quiet=True, recheck=2, device=device) as run:
        model, _ = run.prepare(model, task.optimizer(model.parameters()))
        recheck = run._engine.recheck
        for number, batch in enumerate(batches(run, task, steps, device)):
            due, before = recheck.is_due(run.version), clock()
            run.step(batch, lambda part: task.loss(model, part))
            if number >= NUM_WARMUP_STEPS[device]:
                times[due].append(clock() - before)
        before = clock()
        for _ in range(5):
            recheck._custody.note()
        digest_s = (clock() - before) / 5
    return statistics.median(times[False]), statistics.median(times[True]), digest_s


def batches(run: evenstep.Run, task: Any, steps: int, device: str) -> Iterator[Any]:
    """What a task is trained on for this many steps after the warm-up."""
    steps += NUM_WARMUP_STEPS[device]
    if device == "cuda":
        batch = task.batch(device)
        return (batch for _ in range(steps))
    epochs = -(-steps // 8)
    return islice(run.batches(task.dataset(8 * task.batch_size), batch_size=task.batch_size, epochs=epochs), steps)


def gpu_clock() -> float:
    """The time when the device has done what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "cuda": gpu_clock}


def main() -> int:
    """Measure all tasks; 1 if one costs more than it may."""
    parser = argparse.ArgumentParser(description="What rechecking costs.")
    parser.add_argument("--steps", type=int, default=16, help="steps of each task (default: 16)")
    parser.add_argument("--tasks", help="which (default: mlp,resnet,transformer; on a GPU resnet50,gpt2)")
    parser.add_argument("--device", choices=CLOCKS, default="cpu")
    add_option(parser)
    options = parser.parse_args()
    record = Record.begin()
    lines, good = [], True
    default, means = (
        ("resnet50,gpt2", "%") if options.device == "cuda" else ("mlp,resnet,transformer", "% of processor time")
    )
    for name in (options.tasks or default).split(","):
        plain_s, due_s, digest_s = measure(name, options.steps, options.device)
        steps = 100 * (due_s - plain_s) / (EVERY * plain_s)
        state = 100 * DIGESTS_OF_STATE * digest_s / (EVERY * plain_s)
        good &= steps <= GOAL_STEPS and state <= GOAL_STATE
        figures = [f"{1000 * each:.1f}" for each in (plain_s, due_s, digest_s)]
        lines.append([name, *figures, f"{steps:.2f}", f"{GOAL_STEPS}", f"{state:.3f}"])
    columns = ["task", "step ms", "rechecked ms", "digest ms", f"--recheck {EVERY}, %", "goal", "of it the state, %"]
    record.table(columns, lines, values=columns[4:5], labels=["task"], means=means, base=None, goal="goal")
    record.note(f"Goals: at most {GOAL_STEPS} % and {GOAL_STATE} %: {'reached' if good else 'not reached'}.")
    record.save(options.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
