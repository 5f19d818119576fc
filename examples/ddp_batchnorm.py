"""Batch norm under DDP: only with synchronized statistics do two processes train what one process trains.

Run it: python examples/ddp_batchnorm.py (two CPU processes, a few seconds).
"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.nn import convert_sync_batchnorm

NUM_PROCESSES = 2
NUM_STEPS = 20
BATCH_SIZE = 16


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 4),
    ).double()  # so that rounding does not hide anything


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        images = torch.randn(BATCH_SIZE, 3, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(4, (BATCH_SIZE,), generator=generator)
        yield images, labels


def train(model, rows):
    """The same loop for all: `rows` is the part of each batch that this process computes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()


def train_on_rank(rank, folder):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_PROCESSES)
    per_process = BATCH_SIZE // NUM_PROCESSES
    rows = slice(rank * per_process, (rank + 1) * per_process)

    plain = build()
    train(DistributedDataParallel(plain), rows)

    converted = convert_sync_batchnorm(build())  # the one line that makes the difference
    train(DistributedDataParallel(converted), rows)

    if rank == 0:
        torch.save({"plain": plain.state_dict(), "converted": converted.state_dict()}, f"{folder}/results")
    distributed.barrier()
    distributed.destroy_process_group()


def largest_difference(state, expected):
    pairs = [(state[name], expected[name]) for name in expected if expected[name].is_floating_point()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main():
    single = build()
    train(single, slice(None))
    expected = copy.deepcopy(single.state_dict())

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train_on_rank, args=(folder,), nprocs=NUM_PROCESSES)
        results = torch.load(Path(folder) / "results", weights_only=True)

    print(f"largest relative difference to one process after {NUM_STEPS} steps:")
    for name in ("plain", "converted"):
        difference = largest_difference(results[name], expected)
        verdict = "equal but for rounding" if difference < 1e-9 else "another model"
        print(f"  DDP, {name:9s} batch norm: {difference:.1e}  ({verdict})")


if __name__ == "__main__":
    main()
