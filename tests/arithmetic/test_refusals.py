"""What portable arithmetic cannot make equal is named; what it replaces it gives back."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from evenstep.arithmetic.refusals import Refusals
from evenstep.core.errors import NondeterminismError


@pytest.fixture
def foreign():
    """An operation of somebody else's library, as it would be registered in C++."""
    library = torch.library.Library("foreign", "DEF")
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: x * 3, "CPU")
    yield torch.ops.foreign.triple
    library._destroy()


def lstsq():
    return torch.linalg.lstsq(torch.eye(3), torch.full((3, 1), 2.0)).solution


def test_an_operation_without_a_portable_result_is_refused_by_name():
    refusals = Refusals("error")
    try:
        with pytest.raises(NondeterminismError, match=r"linalg_lstsq .* use torch.linalg.solve"):
            lstsq()
    finally:
        refusals.close()
    assert torch.equal(lstsq(), torch.full((3, 1), 2.0))


def test_told_to_warn_it_warns_once_and_computes():
    refusals = Refusals("warn")
    try:
        with pytest.warns(UserWarning, match="linalg_lstsq"):
            assert torch.equal(lstsq(), torch.full((3, 1), 2.0))
        with warnings.catch_warnings(action="error"):
            lstsq()
    finally:
        refusals.close()


def test_an_operation_of_another_library_is_computed_and_named_once(foreign):
    refusals = Refusals("error")
    try:
        assert torch.equal(foreign(torch.ones(2)), torch.full((2,), 3.0))  # nobody has looked yet
        refusals.look_around()
        with pytest.warns(UserWarning, match="foreign::triple is not an operation of torch"):
            assert torch.equal(foreign(torch.ones(2)), torch.full((2,), 3.0))
        with warnings.catch_warnings(action="error"):
            foreign(torch.ones(2))
    finally:
        refusals.close()
    with warnings.catch_warnings(action="error"):
        assert torch.equal(foreign(torch.ones(2)), torch.full((2,), 3.0))


def test_torchs_own_operations_are_not_watched():
    refusals = Refusals("error")
    try:
        refusals.look_around()
        assert set(refusals._libraries) == {"aten"}
    finally:
        refusals.close()


def test_what_is_compiled_meanwhile_is_noticed(monkeypatch):
    counters = {"stats": {"unique_graphs": 4}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    refusals = Refusals("error")
    try:
        refusals.check()
        counters["stats"]["unique_graphs"] = 5
        with pytest.raises(NondeterminismError, match=r"torch.compile makes kernels for this processor"):
            refusals.check()
    finally:
        refusals.close()


@pytest.mark.parametrize("name", ["matmul", "conv", "rnn"])
def test_a_lower_precision_that_only_some_processors_have_is_refused(name):
    refusals, kind = Refusals("error"), getattr(torch.backends.mkldnn, name)
    try:
        refusals.check()
        kind.fp32_precision = "bf16"
        with pytest.raises(NondeterminismError, match=rf"mkldnn.{name}.fp32_precision is 'bf16', expected 'ieee'"):
            refusals.check()
    finally:
        kind.fp32_precision = "none"
        refusals.close()


def test_kernels_that_are_cut_by_the_size_of_caches_are_refused():
    refusals = Refusals("error")
    torch.backends.mkldnn.enabled = False
    try:
        with pytest.raises(NondeterminismError, match=r"mkldnn.enabled is False, expected True"):
            refusals.check()
    finally:
        torch.backends.mkldnn.enabled = True
        refusals.close()
