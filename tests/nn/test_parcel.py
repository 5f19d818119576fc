"""Tensors come out of a parcel as they went in: bytes, types, shapes, and whether they need gradients."""

import pytest
import torch

from evenstep.nn.parcel import pack, unpack

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_every_type_keeps_its_bytes(dtype):
    given = torch.randn(3, 5).to(dtype)
    (found,) = unpack(pack([given]), CPU)
    assert found.dtype == dtype
    assert torch.equal(found, given)
    assert found.data_ptr() != given.data_ptr()


def test_what_is_none_empty_or_not_contiguous_is_too():
    given = [None, torch.zeros(0, 3), torch.arange(6.0).view(2, 3).t(), torch.tensor(7), None]
    found = unpack(pack(given), CPU)
    assert [f if f is None else f.tolist() for f in found] == [None, [], [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], 7, None]
    assert found[1].shape == (0, 3)


def test_gradients_are_needed_where_they_were():
    given = [torch.ones(2, requires_grad=True), torch.ones(2)]
    assert [t.requires_grad for t in unpack(pack(given), CPU)] == [True, False]


def test_a_parcel_of_nothing_is_not_empty():
    assert pack([]).numel() > 0
    assert unpack(pack([]), CPU) == []


def test_bits_that_are_no_numbers_survive():
    bits = torch.tensor([0x7FC00001, -4194303], dtype=torch.int32)
    (found,) = unpack(pack([bits.view(torch.float32)]), CPU)
    assert torch.equal(found.view(torch.int32), bits)
