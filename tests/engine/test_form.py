"""The form of a tensor is enough to make room for another of its kind, anywhere."""

import json

import pytest
import torch

from evenstep.engine.form import Form

TENSORS = {
    "contiguous": torch.randn(2, 3),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(4, 6).t(),
    "with gaps": torch.randn(8)[::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "a number": torch.tensor(3, dtype=torch.int32),
    "empty": torch.empty(0, 3),
    "a column": torch.randn(5, 1),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_form_keeps_shape_type_and_strides_without_gaps(tensor):
    form = Form.unpack(json.loads(json.dumps(Form.of(tensor).pack())))
    assert form == Form.of(tensor)
    made = torch.empty_strided(form.shape, form.stride, dtype=form.dtype)
    assert made.shape == tensor.shape
    assert made.dtype == tensor.dtype
    assert made.untyped_storage().nbytes() == form.num_bytes


def test_strides_that_leave_no_gaps_are_kept():
    kept = TENSORS["channels last"]
    assert Form.of(kept).stride == kept.stride()
    assert Form.of(TENSORS["transposed"]).stride == (1, 6)
    assert Form.of(TENSORS["with gaps"]).stride == (1,)


def test_what_is_on_the_host_stays_there():
    assert Form.of(torch.zeros(1)).on_host
    assert not Form.of(torch.zeros(1, device="meta")).on_host
