"""A run and its servers call the same tensors differently, and compare them by the server's names."""

import pytest
import torch

from evenstep.core.errors import MismatchError
from evenstep.run.names import bare, bare_names, compare, full


def test_names_go_there_and_back():
    here = {"model.0.weight": 1, "model.model.bias": 2}
    assert bare(here) == {"0.weight": 1, "model.bias": 2}
    assert full(bare(here)) == here
    assert bare_names(here) == ["0.weight", "model.bias"]


def test_another_model_on_the_server_is_named_with_what_differs():
    here = {"a": torch.zeros(2), "b": torch.zeros(3)}
    compare(here, {name: t.clone() for name, t in here.items()})
    with pytest.raises(MismatchError, match=r"'a' is \(\(4,\), torch.float32\) on the server but \(\(2,\)"):
        compare(here, {**here, "a": torch.zeros(4)})
    with pytest.raises(MismatchError, match=r"'b' is None on the server"):
        compare(here, {"a": here["a"]})
    with pytest.raises(MismatchError, match=r"'c' is .* on the server but None here"):
        compare(here, {**here, "c": torch.zeros(1)})
