import os
import resource

import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.transport.memory import ALIGNMENT
from evenstep.transport.segment import Segment
from workers import run_workers


@pytest.fixture
def make():
    """Makes a segment; a factory, because pytest keeps a fixture's value alive until after the leak check."""
    made = []

    def make(num_workers: int = 3) -> Segment:
        made.append(Segment.create(num_workers))
        return made[-1]

    yield make
    for segment in made:
        segment.close()
    made.clear()


def test_a_segment_opened_again_is_the_same_memory(make):
    segment = make()
    other = Segment(os.dup(segment.fd))
    assert (other.num_workers, other.slot_bytes) == (3, segment.slot_bytes)
    mine = segment.memory.reserve(100).tensor(torch.Size([5]), torch.float32)
    theirs = other.memory.reserve(100).tensor(torch.Size([5]), torch.float32)
    mine.copy_(torch.arange(5.0))
    assert torch.equal(mine, theirs)
    other.close()


def test_tensors_of_a_region_are_aligned_and_do_not_overlap(make):
    segment = make()
    region = segment.memory.reserve(4096)
    tensors = [
        region.tensor(torch.Size([n]), dtype) for n, dtype in ((3, torch.float64), (1, torch.int8), (9, torch.half))
    ]
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0], [1], [2]]


def test_two_regions_do_not_overlap(make):
    segment = make()
    with pytest.raises(AssertionError, match="fits into what is left"):
        segment.memory.reserve(4096).tensor(torch.Size([4097]), torch.uint8)
    first, second = (segment.memory.reserve(1).tensor(torch.Size([1]), torch.uint8) for _ in range(2))
    first.fill_(1)
    assert second.item() == 0


def test_any_number_of_regions_costs_few_descriptors(make):
    segment = make()
    before = len(os.listdir("/proc/self/fd"))
    regions = [segment.memory.reserve(5000) for _ in range(500)]
    assert len(os.listdir("/proc/self/fd")) - before < 5
    for value, region in enumerate(regions):
        region.tensor(torch.Size([1250]), torch.float32).fill_(value)
    again = Segment(os.dup(segment.fd))
    for value in range(500):
        assert again.memory.reserve(5000).tensor(torch.Size([1250]), torch.float32).unique().tolist() == [value]
    again.close()


def test_a_region_larger_than_any_window_is_one_range(make):
    segment = make()
    segment.memory.reserve(5000)
    large = segment.memory.reserve(3 << 30).tensor(torch.Size([3 << 30]), torch.uint8)
    after = segment.memory.reserve(10).tensor(torch.Size([10]), torch.uint8)
    large[-1] = 7
    assert after.sum() == 0
    assert large[-2:].tolist() == [0, 7]


def test_a_tensor_keeps_its_layout_and_outlives_the_segment():
    segment = Segment.create(1)
    like = torch.randn(4, 6).t()
    tensor = segment.memory.reserve(4096).tensor(like.shape, like.dtype, like.stride())
    tensor.copy_(like)
    segment.close()
    segment.close()
    del segment
    assert tensor.stride() == like.stride()
    assert torch.equal(tensor, like)


def test_empty_tensors_take_no_place(make):
    segment = make()
    region = segment.memory.reserve(64)
    assert region.tensor(torch.Size([0, 3]), torch.float32).shape == (0, 3)
    assert region.tensor(torch.Size([]), torch.float32).shape == ()


def test_a_descriptor_that_is_no_segment_is_named(tmp_path):
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.touch()
    other.write_bytes(b"x" * 8192)
    for path in (empty, other, "/dev/null"):
        fd = os.open(path, os.O_RDWR)
        with pytest.raises(ConfigError, match=f"file descriptor {fd} is not an evenstep segment"):
            Segment(fd)
        os.close(fd)
    with pytest.raises(ConfigError, match=f"file descriptor {fd} is not an evenstep segment"):
        Segment(fd)  # closed by now, as in a program that a worker started


def test_a_limit_on_file_sizes_is_named_as_the_cause():
    def body(_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(ConfigError, match="ulimit -f unlimited"):
            Segment.create(1)

    run_workers(1, body)


def test_a_region_costs_nothing_until_it_is_written(make):
    segment = make()
    before = os.fstat(segment.fd).st_blocks
    region = segment.memory.reserve(1 << 36)
    assert os.fstat(segment.fd).st_blocks == before
    region.tensor(torch.Size([1024]), torch.float32).fill_(1.0)
    assert os.fstat(segment.fd).st_blocks * 512 - before * 512 <= 1 << 21
