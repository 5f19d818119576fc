"""Plain values, tensors and arrays as bytes."""

import re

import numpy as np
import pytest
import torch

import evenstep
from evenstep.run.values import pack, unpack


def test_what_is_packed_comes_back_with_its_types():
    value = {"a": [1, 2.5, None, True, "text"], 7: (float("inf"), -0.0), "nested": {"deep": [[], {}, ()]}}
    found = unpack(pack(value, "it"))
    assert found == value
    assert type(found[7]) is tuple
    assert str(found[7][1]) == "-0.0"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_tensors_come_back_to_the_bit(dtype):
    tensors = [torch.randn(5, 3).T.to(dtype), torch.tensor(3).to(dtype), torch.empty(0, 4, dtype=dtype)]
    tensors += [torch.randn(1, 3).to(dtype)[:, 0]]  # whose stride is 3
    for before, after in zip(tensors, unpack(pack(tensors, "it")), strict=True):
        assert after.dtype == dtype
        assert after.shape == before.shape
        assert torch.equal(before, after)


def test_arrays_come_back_as_arrays_and_their_numbers_as_numbers():
    array, number = unpack(pack([np.arange(6).reshape(2, 3)[:, ::2], np.float64(0.1)], "it"))
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [[0, 2], [3, 5]]
    assert type(number) is float


@pytest.mark.parametrize("value", [object(), {1, 2}, [lambda: 0], {"x": b"bytes"}, np.array(["text"])])
def test_anything_else_is_refused_by_its_name(value):
    with pytest.raises(evenstep.ConfigError, match=re.escape("what was made holds a ")):
        pack(value, "what was made")
