"""A worker of one process with a prepared model, for tests of what computes and steps."""

import torch
from torch import nn

from evenstep.engine.clipping import Clipping
from evenstep.engine.compute import Work
from evenstep.engine.scaling import Scaling
from evenstep.engine.step import Engine, StepTask
from evenstep.engine.updates import OwnUpdates


class Batch:
    """A whole batch of tensors, cut evenly."""

    def __init__(self, *tensors, shards=4, is_last=False):
        self._tensors, self.is_last, self.name = tensors, is_last, "a batch"
        ends = [(k + 1) * len(tensors[0]) // shards for k in range(shards)]
        self._spans = list(zip([0, *ends], ends, strict=False))
        self.sizes = [end - first for first, end in self._spans]

    def part(self, shard):
        first, end = self._spans[shard]
        return [tensor[first:end] for tensor in self._tensors]

    def check(self):
        pass

    def contents(self, *, alone=False):
        return {}


class Worker:
    """An engine with a model that it has prepared."""

    def __init__(self, holdings, model, optimizer, updates=None):
        self.model, self.holdings = model, holdings
        self.engine = Engine(holdings, updates or OwnUpdates(holdings.group))
        try:
            self.engine.intake.prepare(model, optimizer)
        except BaseException:
            self.engine.close()
            raise
        self.prepared = holdings.optimizers[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def task(self, batch, function, **options):
        clipping = Clipping(options.get("clip_norm"), options.get("clip_value"))
        return StepTask(batch, function, self.prepared, clipping, Scaling())

    def step(self, batch, function, **options):
        return self.engine.step(self.task(batch, function, **options))

    def work(self, batch, function, version=0):
        parts = {k: batch.part(k) for k in range(len(batch.sizes)) if batch.sizes[k]}
        return Work(version, version, parts, batch.sizes, batch.name, function, self.prepared, Clipping(), keeps=0)


def network(seed=1, norm=False):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5) if norm else nn.Tanh(), nn.Linear(5, 2)).double()


def samples(count=9, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64), torch.randint(
        0, 2, (count,), generator=generator
    )
