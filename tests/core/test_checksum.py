"""Equal tensors have one checksum, others have another, whatever their layout."""

import pytest
import torch

from evenstep.core.checksum import checksum


def test_it_is_of_the_elements_not_of_their_layout():
    image = torch.randn(2, 3, 4, 5)
    assert checksum(image) == checksum(image.to(memory_format=torch.channels_last))
    assert checksum(image) != checksum(image.transpose(0, 1))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_one_element_that_differs_is_seen(dtype):
    values = torch.randint(0, 2, (37,)).to(dtype)
    changed = values.clone()
    changed[20] = 1 - changed[20].to(torch.complex64 if dtype.is_complex else torch.float32)
    assert checksum(values) == checksum(values.clone())
    assert checksum(values) != checksum(changed)


def test_an_empty_tensor_and_a_scalar_have_one_too():
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 3))
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(-1.0))
