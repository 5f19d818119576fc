"""Equal tensors have one checksum, others have another, whatever their layout."""

import pytest
import torch

from evenstep.core import checksum as module
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


def test_many_tensors_of_a_device_have_the_checksums_of_each(monkeypatch):
    def naive(tensor):
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        data += bytes(-len(data) % 8)
        total, most = 0, (1 << 64) - 1
        for n in range(0, len(data), 8):
            word = int.from_bytes(data[n : n + 8], "little") ^ (n // 8 + 1)
            mixed = word * 0x9E3779B97F4A7C15 & most
            signed = mixed - (1 << 64) if mixed >> 63 else mixed
            total += ((mixed ^ signed >> 29) & most) * 0x9E3779B97F4A7C15
        return total & most

    monkeypatch.setattr(module, "_PIECE", 256)
    sizes = [0, 1, 7, 127, 128, 129, 1024, 3000]
    tensors = [torch.randn(size) for size in sizes] + [torch.randn(5).bfloat16(), torch.randint(9, (3,))]
    flats = [t.contiguous().flatten().view(torch.uint8) for t in tensors]
    assert [total & ((1 << 64) - 1) for total in module._sums(flats).tolist()] == [naive(t) for t in tensors]
