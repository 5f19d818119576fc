"""What torch calls a reduction, as the C core does it: a pure mapping from (operation, dtype)."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed import ReduceOp

from evenstep.core.errors import UnsupportedError

__all__ = ["BYTES", "ITEM_BYTES", "Reduction", "dtype_code", "reduction"]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
ITEM_BYTES = tuple(dtype.itemsize for dtype in _DTYPES)
"""The size of an item of each type."""

BYTES = _CODES[torch.uint8]
"""The type of data that is only moved."""

_OPS = {name: code for code, name in enumerate(("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))}
_BITWISE = ("BAND", "BOR", "BXOR")
_OF_BOOL = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}


@dataclass(frozen=True)
class Reduction:
    """How to reduce tensors of one dtype.

    Attributes:
        name: The operation in torch's words.
        dtype: The type in the core.
        op: The operation in the core.
        width: How many items of that type an element has: 2 for complex numbers.
        average: Whether the result is to be divided by the number of ranks.
    """

    name: str
    dtype: int
    op: int
    width: int = 1
    average: bool = False


@lru_cache(maxsize=1024)
def reduction(op: ReduceOp.RedOpType, dtype: torch.dtype) -> Reduction:
    """Find the reduction.

    Raises:
        UnsupportedError: There is none of this kind for this dtype.
    """
    name = op.name
    core_op = "SUM" if name in ("AVG", "PREMUL_SUM") else name
    if dtype == torch.bool and core_op in _OF_BOOL and name not in ("AVG", "PREMUL_SUM"):
        return Reduction(name, BYTES, _OPS[_OF_BOOL[core_op]])
    if dtype.is_complex and core_op == "SUM":
        return Reduction(name, _CODES[dtype.to_real()], _OPS["SUM"], width=2, average=name == "AVG")
    if dtype in _CODES and core_op in _OPS and not (dtype.is_floating_point and core_op in _BITWISE):
        return Reduction(name, _CODES[dtype], _OPS[core_op], average=name == "AVG")
    raise UnsupportedError(f"there is no reduction {name} of {dtype}; convert the tensor first")


def dtype_code(dtype: torch.dtype) -> int:
    """A number for any dtype, the same in every process of one version of torch, for comparing."""
    return sum(ord(letter) << (8 * (place % 7)) for place, letter in enumerate(str(dtype)))
