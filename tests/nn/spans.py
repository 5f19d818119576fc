"""One layer over several parts of a batch, in each of the surroundings that it can find itself in.

A span takes a layer and the parts, runs forward and backward with random projections as losses, and returns what one
must be able to compare with a single `nn.BatchNorm` over the whole batch.
"""

import copy
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import evenstep
from evenstep.nn import DataParallel
from workers import Outcome, run_outcomes, run_workers


@dataclass
class Found:
    """What one forward and backward of all parts gave."""

    outputs: list[Tensor]
    input_gradients: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)


def projections(parts: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in parts]


def alone(layer: nn.Module, parts: Sequence[Tensor]) -> Found:
    """What plain torch gives: all parts side by side as one batch [1, C, n]."""
    columns = [p.detach().movedim(1, 0).reshape(1, p.shape[1], -1) for p in parts]
    weights = [p.movedim(1, 0).reshape(1, p.shape[1], -1) for p in projections(parts)]
    x = torch.cat(columns, dim=2).requires_grad_()
    y = layer(x)
    (y.double() * torch.cat(weights, dim=2).double()).sum().backward()
    sizes = [c.shape[2] for c in columns]

    def back(whole: Tensor) -> list[Tensor]:
        pieces = whole.detach().split(sizes, dim=2)
        shapes = [p.movedim(1, 0).shape for p in parts]
        return [piece.reshape(shape).movedim(0, 1) for piece, shape in zip(pieces, shapes, strict=True)]

    return Found(back(y), back(x.grad), _gradients(layer), dict(layer.named_buffers()))


def over_replicas(layer: nn.Module, parts: Sequence[Tensor]) -> Found:
    """The parts on the replicas of `DataParallel`."""
    leaves = [p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in parts]
    model = _Pick(layer, leaves)
    DataParallel(model, devices=["cpu"] * len(parts), timeout_s=20.0)(torch.arange(len(parts)))
    outputs = [model.outputs[n] for n in range(len(parts))]
    losses = [(y.double() * p.double()).sum() for y, p in zip(outputs, projections(parts), strict=True)]
    sum(losses).backward()
    return Found(
        [y.detach() for y in outputs], [x.grad for x in leaves], _gradients(layer), dict(layer.named_buffers())
    )


class _Pick(nn.Module):
    def __init__(self, layer: nn.Module, parts: Sequence[Tensor]) -> None:
        super().__init__()
        self.layer, self.parts, self.outputs = layer, parts, {}

    def forward(self, number: Tensor) -> Tensor:
        n = int(number)
        self.outputs[n] = self.layer(self.parts[n])
        return number


def over_ranks(layer: nn.Module, parts: Sequence[Tensor], folder: Path) -> Found:
    """The parts on the ranks of a process group."""

    def body(rank: int) -> Found:
        return one_rank(layer, parts, rank)

    found = run_ranks(len(parts), body, folder)
    gradients = {name: sum(f.gradients[name] for f in found) for name in found[0].gradients}
    for other in found[1:]:
        assert_same_bytes(other.buffers, found[0].buffers)
    return Found([f.outputs[0] for f in found], [f.input_gradients[0] for f in found], gradients, found[0].buffers)


def one_rank(layer: nn.Module, parts: Sequence[Tensor], rank: int) -> Found:
    """What one rank does; for bodies of `run_ranks`."""
    x = parts[rank].detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    (y.double() * projections(parts)[rank].double()).sum().backward()
    return Found([y.detach()], [x.grad], _gradients(layer), dict(layer.named_buffers()))


def over_shards(layer: nn.Module, parts: Sequence[Tensor], num_workers: int = 1) -> Found:
    """The parts on the shards of a run, one each."""

    def body(worker: int) -> Found:
        model, num = _Shifted(copy.deepcopy(layer)), len(parts)
        outputs, inputs = {}, {}
        projected = projections(parts)

        def step(numbers: Tensor) -> Tensor:
            n = int(numbers)
            x = parts[n] + model.shift.to(parts[n].dtype)
            if not parts[n].is_contiguous():
                x = x.to(memory_format=torch.channels_last)
            x.register_hook(lambda dx: inputs.__setitem__(n, dx * num))
            y = model.layer(x)
            outputs[n] = y.detach()
            return (y.double() * projected[n].double()).sum()

        with evenstep.Run(shards=num, quiet=True, timeout_s=20.0) as run:
            parameters = dict(model.layer.named_parameters())
            optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), {}
            optimizer.register_step_pre_hook(
                lambda *_: seen.update({n: p.grad * num for n, p in parameters.items() if p.grad is not None})
            )
            run.prepare(model, optimizer, whole=True)
            run.step(torch.arange(num), step)
        return Found(outputs, inputs, seen, dict(model.layer.named_buffers()))

    found = run_workers(num_workers, body, shards=len(parts))
    outputs, inputs, gradients = {}, {}, {}
    for f in found:
        outputs |= f.outputs
        inputs |= f.input_gradients
        gradients |= f.gradients
        assert_same_bytes(f.buffers, found[0].buffers)
    numbers = range(len(parts))
    return Found([outputs[n] for n in numbers], [inputs[n] for n in numbers], gradients, found[0].buffers)


class _Shifted(nn.Module):
    """Makes every input depend on a parameter, so that its gradient is computed."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.shift = layer, nn.Parameter(torch.zeros(()))


def _gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def run_ranks(num_ranks: int, body: Callable[[int], Any], folder: Path, *, timeout_s: float = 20.0) -> list[Any]:
    """Run `body(rank)` on the ranks of a gloo process group; return what they returned."""
    return run_workers(num_ranks, _joined(body, num_ranks, folder, timeout_s))


def rank_outcomes(
    num_ranks: int, body: Callable[[int], Any], folder: Path, *, timeout_s: float = 20.0
) -> list[Outcome]:
    """As `run_ranks`, but a rank that fails is an outcome like any other."""
    return run_outcomes(num_ranks, _joined(body, num_ranks, folder, timeout_s))


def _joined(body: Callable[[int], Any], num_ranks: int, folder: Path, timeout_s: float) -> Callable[[int], Any]:
    def joined(rank: int) -> Any:
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks
        )
        set_timeout(timeout_s)
        value = body(rank)
        distributed.barrier()
        distributed.destroy_process_group()
        return value

    return joined


def set_timeout(timeout_s: float) -> None:
    """Let this rank wait for the others no longer than this from now on; until then it is patient."""
    distributed.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s))


def assert_close(found: Found, expected: Found, relative: float) -> None:
    pairs = [
        *((f"output {n}", *pair) for n, pair in enumerate(zip(found.outputs, expected.outputs, strict=True))),
        *(
            (f"input gradient {n}", *pair)
            for n, pair in enumerate(zip(found.input_gradients, expected.input_gradients, strict=True))
        ),
    ]
    for kind in ("gradients", "buffers"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys(), kind
        pairs += [(name, ours[name], theirs[name]) for name in ours]
    scale = {kind: max((float(t.abs().max()) for w, _, t in pairs if w.startswith(kind) and t.numel()), default=1.0)
             for kind in ("output", "input gradient")}  # fmt: skip
    for what, ours, theirs in pairs:
        assert ours.shape == theirs.shape, what
        assert ours.dtype == theirs.dtype, what
        if ours.numel():
            kind = what.rpartition(" ")[0]
            bound = scale.get(kind) or float(theirs.abs().max()) or 1.0
            error = float((ours.double() - theirs.double()).abs().max()) / bound
            assert error <= relative, f"{what} is off by {error:.2e} relative"


def assert_same_bytes(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.detach().contiguous().view(-1).numpy().tobytes() == (
            theirs[name].detach().contiguous().view(-1).numpy().tobytes()
        ), name
