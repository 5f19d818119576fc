"""What it costs to compute one step in 100 twice, and to look after the state meanwhile.

Run it by itself (``python benchmarks/recheck.py``) or through ``make bench``. Every other step of a run on one worker
is rechecked; the processor time of those and of the others is measured apart, and that of a digest of the whole state,
of which a step that is rechecked takes three. From these come the shares of one step in 100. A run without recheck asks
once in a step whether it is due.
"""

import argparse
import statistics
import sys
import time

import evenstep
from models import TASKS
from results import Record, add_option

EVERY = 100
GOAL_STEPS, GOAL_STATE = 1.5, 0.5  # percent
NUM_WARMUP_STEPS = 2
DIGESTS_OF_STATE = 3


def measure(name: str, steps: int) -> tuple[float, float, float]:
    """Processor seconds of a step, of one that is rechecked, and of a digest of the state."""
    task = TASKS[name]
    dataset, model = task.dataset(8 * task.batch_size), task.model()
    optimizer = task.optimizer(model.parameters())
    times: dict[bool, list[float]] = {False: [], True: []}
    with evenstep.Run(seed=0, quiet=True, recheck=2) as run:
        model, optimizer = run.prepare(model, optimizer)
        recheck = run._engine.recheck
        for number, batch in enumerate(run.batches(dataset, batch_size=task.batch_size, epochs=1 + steps // 8)):
            due, before = recheck.is_due(run.version), time.process_time()
            run.step(batch, lambda part: task.loss(model, part))
            if number >= NUM_WARMUP_STEPS:
                times[due].append(time.process_time() - before)
        before = time.process_time()
        for _ in range(5):
            recheck._custody.note()
        digest_s = (time.process_time() - before) / 5
    return statistics.median(times[False]), statistics.median(times[True]), digest_s


def main() -> int:
    """Measure all tasks; 1 if one costs more than it may."""
    parser = argparse.ArgumentParser(description="What rechecking costs.")
    parser.add_argument("--steps", type=int, default=16, help="steps of each task (default: 16)")
    parser.add_argument("--tasks", default="mlp,resnet,transformer", help="which (default: mlp,resnet,transformer)")
    add_option(parser)
    options = parser.parse_args()
    record = Record.begin()
    lines, good = [], True
    for name in options.tasks.split(","):
        plain_s, due_s, digest_s = measure(name, options.steps)
        steps = 100 * (due_s - plain_s) / (EVERY * plain_s)
        state = 100 * DIGESTS_OF_STATE * digest_s / (EVERY * plain_s)
        good &= steps <= GOAL_STEPS and state <= GOAL_STATE
        figures = [f"{1000 * each:.1f}" for each in (plain_s, due_s, digest_s)]
        lines.append([name, *figures, f"{steps:.2f}", f"{GOAL_STEPS}", f"{state:.3f}"])
    columns = ["task", "step ms", "rechecked ms", "digest ms", f"--recheck {EVERY}, %", "goal", "of it the state, %"]
    record.table(
        columns, lines, values=columns[4:5], labels=["task"], means="% of processor time", base=None, goal="goal"
    )
    record.note(f"Goals: at most {GOAL_STEPS} % and {GOAL_STATE} %: {'reached' if good else 'not reached'}.")
    record.save(options.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
