"""The side of evenstep in ``engine.py``: train one task and write down how long each step took.

``python benchmarks/train_ours.py --model resnet --steps 10 --out times.json`` is one worker;
``python -m evenstep run -n 2 benchmarks/train_ours.py ...`` is two. Worker 0 writes the times in seconds as a JSON
list.
"""

import argparse
import json
import math
import time
from pathlib import Path

import evenstep
from models import TASKS

NUM_WARMUP_STEPS = 3  # as in engine.py, which is not imported here: a worker should start fast
MAX_BATCHES = 32


def main() -> None:
    """Train and, on worker 0, write the times."""
    parser = argparse.ArgumentParser(description="Time evenstep's training step.")
    parser.add_argument("--model", choices=sorted(TASKS), required=True, help="the task to train")
    parser.add_argument("--shards", type=int, default=8, help="the number of shards (default: 8)")
    parser.add_argument("--steps", type=int, required=True, help="how many steps to time after the warm-up")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="what to count (default: wall)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file for the times in seconds")
    options = parser.parse_args()

    clock = time.process_time if options.clock == "processor" else time.perf_counter
    task = TASKS[options.model]
    total = NUM_WARMUP_STEPS + options.steps
    num_batches = min(total, MAX_BATCHES)
    dataset = task.dataset(num_batches * task.batch_size)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    times: list[float] = []
    with evenstep.Run(shards=options.shards, seed=0, quiet=True, threads=1) as run:
        model, optimizer = run.prepare(model, optimizer)
        epochs = math.ceil(total / num_batches)  # whole epochs: leaving early is not what this measures
        before = clock()
        for batch in run.batches(dataset, batch_size=task.batch_size, epochs=epochs):
            run.step(batch, lambda part: task.loss(model, part))
            now = clock()
            times.append(now - before)
            before = now
        if run.worker == 0:
            options.out.write_text(json.dumps(times[NUM_WARMUP_STEPS:total]))


if __name__ == "__main__":
    main()
