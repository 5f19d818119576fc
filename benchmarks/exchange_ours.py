"""The side of evenstep in the row ``exchange`` of ``engine.py``: time one small exchange between two workers.

``python -m evenstep run -n 2 benchmarks/exchange_ours.py --steps 2000 --out times.json``. Each of two shards offers
1 KiB (256 float32); worker 0 writes the times of the calls in seconds as a JSON list. What is timed is the exchange
that every step is made of; with ``--recorded`` it is ``run.exchange``, an operation of the script that is committed to
the journal like any other.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import evenstep

NUM_SHARDS = 2
NUM_FLOATS = 256


def main() -> None:
    """Exchange and, on worker 0, write the times."""
    parser = argparse.ArgumentParser(description="Time evenstep's exchange of 1 KiB.")
    parser.add_argument("--steps", type=int, default=2000, help="how many calls to time (default: 2000)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file for the times in seconds")
    parser.add_argument("--recorded", action="store_true", help="time run.exchange")
    options = parser.parse_args()

    num_warmup_calls = options.steps // 10
    times: list[float] = []
    with evenstep.Run(shards=NUM_SHARDS, seed=0, quiet=True, threads=1) as run:
        offered = torch.ones(NUM_SHARDS // run.num_workers, NUM_FLOATS)
        shares = [len(offered)] * run.num_workers
        group = run._ledger.group  # what the engine exchanges through
        for _ in range(num_warmup_calls + options.steps):
            before = time.perf_counter()
            total = run.exchange("bench", offered) if options.recorded else group.sum("bench", offered, shares)
            times.append(time.perf_counter() - before)
        if not torch.equal(total, torch.full((NUM_FLOATS,), float(NUM_SHARDS))):
            raise SystemExit(f"the exchange of ones over {NUM_SHARDS} shards gave {total[:4].tolist()}...")
        if run.worker == 0:
            options.out.write_text(json.dumps(times[num_warmup_calls:]))


if __name__ == "__main__":
    main()
