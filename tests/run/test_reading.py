"""A checkpoint is read by the first worker only; the others know what it is like, and what was wrong with it."""

import pytest
import torch
from fakes import together

from evenstep.core.errors import CheckpointError
from evenstep.run.reading import read_for_all


def test_the_others_get_the_facts_and_tensors_without_values(groups_of):
    held = {"weight": torch.randn(3, 4).t(), "count": torch.tensor(7)}
    reads = []

    def read():
        reads.append(1)
        return {"version": 5}, held

    (facts, mine), (others_facts, theirs) = together(groups_of(2), lambda g: read_for_all(g, "checkpoint", read))
    assert len(reads) == 1
    assert facts == others_facts == {"version": 5}
    assert mine is held
    for name, tensor in held.items():
        assert theirs[name].is_meta
        assert (theirs[name].shape, theirs[name].dtype) == (tensor.shape, tensor.dtype)
        assert theirs[name].stride() == tensor.stride()


def test_what_cannot_be_read_is_a_fact_that_everyone_has(groups_of):
    def read():
        raise CheckpointError("'weight' has been altered")

    for facts, tensors in together(groups_of(2), lambda group: read_for_all(group, "checkpoint", read)):
        assert facts == {"failure": "'weight' has been altered"}
        assert tensors == {}


def test_an_error_of_another_kind_is_nobody_s_fact(groups_of):
    def read():
        raise LookupError("a mistake of ours")

    with pytest.raises(LookupError):
        read_for_all(groups_of(1)[0], "checkpoint", read)
