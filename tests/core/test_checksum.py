"""Equal tensors have one checksum, others have another, whatever their layout."""

import pytest
import torch

from evenstep.core import checksum as module
from evenstep.core.checksum import checksum, checksums, launch_checksums, launch_checksums_of_pieces


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


SIZES = [0, 1, 7, 127, 128, 129, 1024, 3000]


def flats():
    """Bytes of tensors of many sizes and types; the last is not aligned to words."""
    tensors = [torch.randn(size) for size in SIZES] + [torch.randn(5).bfloat16(), torch.randint(9, (3,))]
    return [t.flatten().view(torch.uint8) for t in tensors] + [torch.randn(100).bfloat16().view(torch.uint8)[2:]]


def expected_sums(of):
    """What the C core says, without the lengths."""
    return [(checksum(flat) ^ flat.numel()) - (1 << 64) * ((checksum(flat) ^ flat.numel()) >> 63) for flat in of]


def test_torch_s_operations_give_what_the_c_core_gives(monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 256)
    of = flats()
    assert module._sums(of).tolist() == expected_sums(of)


def test_and_so_does_the_kernel(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(module, "_PROGRAM", 2048)
    of = [*flats(), torch.randint(256, (8 * 2048 * 2 + 24,), dtype=torch.uint8)]
    expected = launch_checksums(of).tolist()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # the kernel's interpreter takes memory of the host
    assert launch_checksums(of).tolist() == expected


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("size", [64, 4096, 4096 + 8, 3 * 4096 - 5])
def test_pieces_have_the_checksums_of_tensors(size, by_kernel, monkeypatch):
    flat = torch.randint(256, (size,), dtype=torch.uint8)
    expected = launch_checksums(flat.split(4096)).tolist()
    if by_kernel:
        pytest.importorskip("triton")
        monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert launch_checksums_of_pieces(flat, 4096).tolist() == expected


def test_words_are_for_whoever_waits_for_them():
    tensors = [torch.randn(30), torch.randint(9, (3,))]
    assert [number & ((1 << 64) - 1) for number in launch_checksums(tensors).tolist()] == checksums(tensors)
    assert checksums([]) == []
