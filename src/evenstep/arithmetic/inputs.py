"""Inputs for the probe, the same bits everywhere: they come from integers, by exact operations only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Input", "filled", "gradients", "magnitudes", "numbers", "of", "spread", "with_gradients"]

Input = Callable[[], Tensor]


def _hash(count: int, salt: int) -> Tensor:
    """Sixty-four mixed bits for each of the first `count` whole numbers."""
    x = torch.arange(count, dtype=torch.int64) + salt * 0x632BE59BD9B4E019 % (1 << 62)
    for factor in (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = x * factor
        x = x ^ (x >> 29)
    return x


def numbers(*shape: int, salt: int = 0) -> Tensor:
    """Floats from -2 to 2 with all bits of their mantissas in use; each `salt` gives different ones."""
    return (_hash(torch.Size(shape).numel(), salt) & 0xFFFFFF).float().mul(2.0**-22).sub(2.0).view(shape)


def magnitudes(count: int, least: int = -12, most: int = 5) -> Tensor:
    """Floats of both signs from 2**least to 2**most, about as many of each magnitude."""
    mixed = _hash(count, 0)
    exponents = 127 + least + ((mixed >> 24) & 0xFFFF) % (most - least)
    bits = (mixed & 0x7FFFFF) | (exponents << 23) | (((mixed >> 50) & 1) << 31)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def of(*shape: int, salt: int = 0, dtype: torch.dtype = torch.float32) -> Input:
    """A function that makes `numbers` when they are needed."""
    return lambda: numbers(*shape, salt=salt).to(dtype)


def spread(count: int, dtype: torch.dtype = torch.float32) -> Input:
    """A function that makes `magnitudes`."""
    return lambda: magnitudes(count).to(dtype)


def with_gradients(function: Callable[..., Tensor], *inputs: Input) -> list[Tensor]:
    """The result of a function and, for a fixed gradient of it, the gradients of its inputs."""
    leaves = [make().detach().clone().requires_grad_() for make in inputs]
    result = function(*leaves)
    result.backward(numbers(*result.shape, salt=99).to(result.dtype))  # type: ignore[no-untyped-call]
    return [result, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def filled(module: nn.Module) -> Any:
    """The module, its parameters replaced by numbers of the usual size."""
    with torch.no_grad():
        for salt, parameter in enumerate(module.parameters()):
            parameter.copy_(numbers(*parameter.shape, salt=salt) / 8)
    return module


def gradients(module: nn.Module) -> list[Tensor]:
    """The gradients of its parameters."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
