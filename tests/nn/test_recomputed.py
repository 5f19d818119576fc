"""What a call found is found again by the bits of its input, as long as its graph lives, and never mistaken."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from evenstep.core.errors import UnsupportedError
from evenstep.nn import passes
from evenstep.nn.passes import Part
from evenstep.nn.recomputed import NormCall, recall, remember


def input_of(seed):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))


def own(x):
    return passes.statistics([Part(x, None, None)])[0].clone()


def call_of(mean, tag="bn call 0"):
    return NormCall(None, tag, SimpleNamespace(stats=(torch.tensor(mean),)), [])


def test_a_call_is_found_by_an_input_with_the_same_bits():
    layer, first, second = nn.BatchNorm1d(3), call_of(1.0), call_of(2.0)
    remember(layer, own(input_of(1)), first)
    remember(layer, own(input_of(2)), second)
    assert recall(layer, input_of(1)) is first
    assert recall(layer, input_of(2)) is second
    assert recall(layer, input_of(3)) is None
    assert recall(nn.BatchNorm1d(3), input_of(1)) is None, "another layer has met nobody"


def test_what_was_found_goes_with_its_graph():
    layer, call = nn.BatchNorm1d(3), call_of(1.0)
    remember(layer, own(input_of(1)), call)
    del call
    assert recall(layer, input_of(1)) is None


def test_two_calls_that_cannot_be_told_apart_are_refused_unless_they_found_the_same():
    layer, first, same = nn.BatchNorm1d(3), call_of(1.0), call_of(1.0)
    remember(layer, own(input_of(1)), first)
    remember(layer, own(input_of(1)), same)
    assert recall(layer, input_of(1)) is same
    other = call_of(2.0, "bn call 2")
    remember(layer, own(input_of(1)), other)
    with pytest.raises(
        UnsupportedError, match="'bn call 2' is recomputed in backward, but an earlier call had an input"
    ):
        recall(layer, input_of(1))
