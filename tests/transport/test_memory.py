"""One contract for every memory; the segment's own tests show that workers share what it reserves."""

import pytest
import torch

from evenstep.transport.memory import DeviceMemory
from evenstep.transport.segment import Segment


def on_every_kind(test):
    """Run a test with each memory; a plain argument, because pytest keeps a fixture's value alive too long."""

    @pytest.mark.parametrize("kind", ["host", "device"])
    def run(kind):
        if kind == "device":
            test(DeviceMemory(torch.device("cpu")))
            return
        segment = Segment.create(2)
        test(segment.memory)
        segment.close()

    return run


@on_every_kind
def test_tensors_have_the_form_that_was_asked_for_and_memory_of_their_own(memory):
    region = memory.reserve(4096)
    first = region.tensor(torch.Size([2, 3]), torch.float64, (1, 2))
    second = region.tensor(torch.Size([5]), torch.bfloat16)
    assert first.stride() == (1, 2)
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all()
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    assert first.device == memory.device


@on_every_kind
def test_words_begin_with_zero_on_the_host(memory):
    words = memory.words(9)
    assert words.device.type == "cpu"
    assert words.tolist() == [0] * 9
    assert words.dtype == torch.int64


@on_every_kind
def test_scratch_may_be_laid_out_anew(memory):
    memory.scratch(64).tensor(torch.Size([4]), torch.float32).fill_(3)
    memory.clear_scratch()
    assert memory.scratch(64).tensor(torch.Size([4]), torch.float32).shape == (4,)
    memory.fence()
