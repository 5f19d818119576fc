"""A batch hands out the same samples however often it is asked, whatever was done to those of last time."""

import pytest
import torch

from evenstep.core.errors import UnsupportedError
from evenstep.data.batch import Batch


def loaded():
    return Batch("batch", [2, 2], lambda shard: {"x": torch.full((2,), float(shard))}, {})


def whole():
    tensor = torch.arange(4.0)
    return Batch("batch", [2, 2], lambda shard: tensor[2 * shard :][:2], {}, whole=tensor)


def test_samples_that_were_changed_in_place_are_loaded_again():
    batch = loaded()
    batch.part(0)["x"].mul_(2).add_(7)
    batch.part(1)["x"].zero_()
    batch.check()
    assert batch.part(0)["x"].tolist() == [0.0, 0.0]
    assert batch.part(1)["x"].tolist() == [1.0, 1.0]


def test_samples_that_were_not_changed_are_loaded_once():
    batch = loaded()
    assert batch.part(1)["x"] is batch.part(1)["x"]


def test_those_on_their_way_to_the_device_are_taken_once():
    sent = torch.zeros(2)
    batch = Batch("batch", [2], lambda shard: torch.ones(2), {0: torch.ones(2)}, sent=lambda: {0: sent})
    assert batch.part(0) is sent
    sent.add_(1)
    assert batch.part(0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("ask", [Batch.check, lambda batch: batch.part(1)])
def test_a_batch_of_the_script_that_was_changed_in_place_is_refused(ask):
    batch = whole()
    batch.part(0)
    batch.part(1).mul_(2)
    with pytest.raises(UnsupportedError, match=r"changed the batch in place.*work on a copy.*run\.batches"):
        ask(batch)


def test_what_torch_does_not_count_is_left_alone():
    with torch.inference_mode():
        batch = Batch("batch", [2], lambda shard: torch.zeros(2), {})
        batch.part(0).add_(1)
        batch.check()
