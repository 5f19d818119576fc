"""Exactness on one GPU: one training on several numbers of workers that share it, and again; fingerprints and times.

Run it on a machine with a GPU: ``python benchmarks/gpu_exactness.py``. The exit code is 1 if any fingerprint differs.
In bfloat16 the batch norms are fused with what follows them. With ``--train`` it is itself the training script that the
launcher starts.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.nn import convert_sync_batchnorm
from results import Record, add_option, shown


class Network(nn.Module):
    """A convolution, batch norm, dropout and attention: a little of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1))
        self.block = nn.Sequential(nn.Conv2d(32, 32, 3, stride=4), nn.BatchNorm2d(32), nn.ReLU())
        self.attention = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 32, 32] to [N, 10]."""
        features = self.block(self.stem(x)).flatten(2).transpose(1, 2)
        return self.head(self.attention(features).mean(1))


def train(device: str, autocast: bool) -> None:
    """Train for a few steps; worker 0 prints the loss and the time of a step."""
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(
        torch.randn(500, 3, 32, 32, generator=generator), torch.randint(0, 10, (500,), generator=generator)
    )
    with evenstep.Run(shards=8, seed=0, device=device) as run:
        model = convert_sync_batchnorm(Network(), fuse=autocast)
        model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))

        def loss(part: list[Tensor]) -> Tensor:
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                return F.cross_entropy(model(part[0]), part[1])

        begin = time.perf_counter()
        for batch in run.batches(dataset, batch_size=128, epochs=5):
            found = run.step(batch, loss, clip_norm=1.0)
        scores = run.evaluate(dataset, 128, lambda part: {"accuracy": model(part[0]).argmax(1) == part[1]})
        if run.worker == 0:
            took = (time.perf_counter() - begin) / run.version * 1e3
            print(f"loss {float(found)!r} accuracy {scores['accuracy']!r} step_ms {took:.1f}")


def main() -> int:
    """Compare numbers of workers; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="what to train on (default: cuda)")
    parser.add_argument("--workers", default="1,1,2,3,5,8", help="numbers of workers (default: 1,1,2,3,5,8)")
    parser.add_argument("--train", action="store_true", help="be the training script (internal)")
    parser.add_argument("--autocast", action="store_true", help="train in bfloat16 (internal)")
    add_option(parser)
    options = parser.parse_args()
    if options.train:
        train(options.device, options.autocast)
        return 0
    record = Record.begin()
    record.table(["workers", "dtype", "ms a step", "loss", "accuracy", "fingerprint"], shown(rows(options)))
    equal = len({(dtype, *found) for _, dtype, _, *found in record.tables[0].rows}) == 2  # one a dtype
    record.note("All are equal." if equal else "They differ.")
    record.save(options.json)
    return 0 if equal else 1


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    """Train on one number of workers after the other.

    Raises:
        SystemExit: A run failed.
    """
    for autocast in (False, True):
        for count in options.workers.split(","):
            command = [sys.executable, "-m", "evenstep", "run", "-n", count, str(Path(__file__)), "--train"]
            command += ["--device", options.device, *(["--autocast"] if autocast else [])]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=os.environ)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            *_, result, fingerprint = done.stdout.strip().splitlines()
            loss, accuracy, took = result.split()[2::2]
            yield [count, "bfloat16" if autocast else "float32", took, loss, accuracy, fingerprint.split()[-1]]


if __name__ == "__main__":
    sys.exit(main())
