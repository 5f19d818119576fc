"""A copy that takes a tensor's place lies in memory as the tensor does, and has memory of its own."""

import pytest
import torch

from evenstep.engine.twins import twin_of

BASE = torch.arange(600.0).view(20, 30)
TENSORS = {
    "whole": BASE,
    "rows": BASE[3:7],
    "columns": BASE[:, 5:9],
    "every other": BASE[1::2, ::3],
    "transposed": BASE[1:9].t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)[1:],
    "expanded": BASE[2:3].expand(4, 30),
    "a scalar": BASE[3, 7],
    "bytes": torch.arange(100, dtype=torch.uint8)[7:50],
    "halves": BASE.bfloat16()[:, 1:],
    "nothing": BASE[:0],
    "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
    "sparse": torch.eye(4).to_sparse(),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_twin_has_the_values_and_memory_of_its_own(tensor):
    twin = twin_of(tensor)
    assert torch.equal(twin.to_dense(), tensor.to_dense())
    assert twin.dtype == tensor.dtype
    if tensor.layout is torch.strided and tensor.numel():
        assert twin.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in ("nothing", "conjugated", "sparse")])
def test_and_lies_as_the_tensor_does(name):
    tensor = TENSORS[name]
    twin = twin_of(tensor)
    assert twin.stride() == tensor.stride()
    assert (twin.data_ptr() - tensor.data_ptr()) % 64 == 0


def test_a_twin_of_what_asks_for_a_gradient_does_too():
    assert twin_of(torch.ones(3, requires_grad=True)).requires_grad
    assert not twin_of(torch.ones(3)).requires_grad
