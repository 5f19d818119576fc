"""The bytes of tensors, whatever their strides."""

import pytest
import torch

from evenstep.core.checksum import checksums
from evenstep.core.fingerprint import digest
from evenstep.core.octets import octets

TENSORS = [
    torch.randn(4, 3),
    torch.randn(4, 3).T,
    torch.randn(4, 3)[:, 1],
    torch.randn(1, 3)[:, 1],  # one element, with a stride of 3
    torch.randn(2, 3)[1:, 2:].bfloat16(),
    torch.tensor(2.5, requires_grad=True),
    torch.empty(0, 2),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}")
def test_bytes_are_those_of_the_elements_in_their_order(tensor):
    again = torch.tensor(tensor.tolist(), dtype=tensor.dtype).reshape(tensor.shape)
    assert octets(tensor).tolist() == list(again.reshape(-1).view(torch.uint8))
    assert digest("it", tensor) == digest("it", again)
    assert checksums([tensor]) == checksums([again])


def test_what_is_contiguous_is_not_copied():
    tensor = torch.zeros(3)
    octets(tensor)[3] = 64
    assert tensor.tolist() == [2.0, 0.0, 0.0]
