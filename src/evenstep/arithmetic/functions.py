"""Functions of one tensor, element by element, that the probe computes."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["UNARY"]

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": lambda x: torch.log(x.abs()),
    "log2": lambda x: torch.log2(x.abs()),
    "log10": lambda x: torch.log10(x.abs()),
    "log1p": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": lambda x: torch.asin(x / 33),
    "acos": lambda x: torch.acos(x / 33),
    "atan": torch.atan,
    "sinh": lambda x: torch.sinh(x / 8),
    "cosh": lambda x: torch.cosh(x / 8),
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfinv": lambda x: torch.erfinv(x / 33),
    "lgamma": lambda x: torch.lgamma(x.abs()),
    "digamma": lambda x: torch.digamma(x.abs().detach() + 0 * x),
    "pow": lambda x: torch.pow(x.abs(), 1.7),
    "pow of tensor": lambda x: torch.pow(x.abs(), x.detach() / 8),
    "atan2": lambda x: torch.atan2(x, x.detach().roll(1)),
    "hypot": lambda x: torch.hypot(x, x.detach().roll(1)),
    "sigmoid": torch.sigmoid,
    "log_sigmoid": F.logsigmoid,
    "gelu": F.gelu,
    "gelu tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
    "selu": F.selu,
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
}
