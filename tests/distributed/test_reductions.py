"""Which operations reduce which types, and how the core does them."""

import pytest
import torch
from torch.distributed import ReduceOp

from evenstep.core.errors import UnsupportedError
from evenstep.distributed.reductions import BYTES, ITEM_BYTES, dtype_code, reduction

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OPS = ReduceOp.RedOpType


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_an_item_has_the_size_of_its_type_in_the_core(dtype):
    assert ITEM_BYTES[reduction(OPS.SUM, dtype).dtype] == dtype.itemsize


@pytest.mark.parametrize(
    ("op", "on_bools"), [(OPS.SUM, OPS.BOR), (OPS.PRODUCT, OPS.BAND), (OPS.MIN, OPS.BAND), (OPS.MAX, OPS.BOR)]
)
def test_bools_are_reduced_as_bits(op, on_bools):
    found = reduction(op, torch.bool)
    assert (found.dtype, found.op) == (BYTES, reduction(on_bools, torch.uint8).op)


def test_a_complex_number_is_two_floats_and_has_only_sums():
    found = reduction(OPS.AVG, torch.complex64)
    assert (found.dtype, found.width, found.average) == (reduction(OPS.SUM, torch.float32).dtype, 2, True)
    with pytest.raises(UnsupportedError, match=r"there is no reduction MAX of torch\.complex64"):
        reduction(OPS.MAX, torch.complex64)


@pytest.mark.parametrize(
    ("op", "dtype"), [(OPS.BXOR, torch.float32), (OPS.AVG, torch.bool), (OPS.PREMUL_SUM, torch.bool)]
)
def test_what_makes_no_sense_is_refused_by_name(op, dtype):
    with pytest.raises(UnsupportedError, match=f"there is no reduction {op.name} of {dtype}; convert the tensor first"):
        reduction(op, dtype)


def test_types_have_different_numbers():
    types = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len({dtype_code(dtype) for dtype in types}) == len(types)
    assert all(0 <= dtype_code(dtype) < 1 << 63 for dtype in types)
