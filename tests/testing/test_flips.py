"""Flips are planned by the seed, struck once or from then on, and each is found and named."""

import pytest
import torch

from evenstep.core import points
from evenstep.core.errors import ConfigError
from evenstep.testing import DATA, Fault, faults, flips, plant
from workers import fork_run


@pytest.fixture
def armed(tmp_path):
    """Arms a plan in this process, as worker 1."""

    def arm(*planned, in_order=False):
        plant(planned, tmp_path, in_order=in_order)
        faults.arm(tmp_path, 1)
        return tmp_path

    yield arm
    points.arm(None)


def passed(count, what="gradient"):
    """How often each of so many tensors was altered."""
    found = []
    for _ in range(count):
        tensor = torch.zeros(4)
        points.touch(what, tensor)
        found.append(int(tensor.view(torch.int32).ne(0).sum()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_one_bit_is_another_one_and_turned_over_again_it_is_as_before(dtype, shape):
    tensor = torch.ones(shape, dtype=dtype)
    bits = 8 * tensor.numel() * tensor.element_size()
    for bit in (0, bits - 1) if dtype is not torch.bool else (0,):
        before = tensor.clone()
        faults.flip(tensor, bit)
        assert (tensor.view(-1).view(torch.uint8) != before.view(-1).view(torch.uint8)).sum() == 1
        assert tensor._version == 0, "torch does not see it, as it would not see a broken machine"
        faults.flip(tensor, bit + bits)
        assert torch.equal(tensor, before)


def test_what_is_not_laid_out_in_order_is_flipped_too():
    tensor = torch.zeros(2, 3).t()
    faults.flip(tensor, 32 * 1 + 30)
    assert tensor[0, 1] == 2.0


def test_it_strikes_once_at_its_visit_on_its_worker(armed):
    directory = armed(Fault("flip", "gradient", 3, worker=1), Fault("flip", "gradient", 1, worker=0))
    assert passed(5) == [0, 0, 1, 0, 0]
    assert faults.struck(directory) == [0]
    assert passed(2, "buffer") == [0, 0]


def test_or_from_then_on(armed):
    armed(Fault("flip", "gradient", 2, lasting=True))
    assert passed(4) == [0, 1, 1, 1]


def test_in_order_one_waits_for_the_one_before(armed):
    armed(
        Fault("flip", "gradient", 2),
        Fault("slow", "after commit", seconds=0.0),
        Fault("flip", "gradient"),
        in_order=True,
    )
    assert passed(4) == [0, 1, 0, 0]
    points.reach("after commit")
    assert passed(2) == [1, 0]


def test_a_flip_happens_to_data_and_nothing_else_does(tmp_path):
    with pytest.raises(ConfigError, match=f"there is no point 'forward'; expected one of {', '.join(DATA)}"):
        plant([Fault("flip", "forward")], tmp_path)
    with pytest.raises(ConfigError, match="there is no point 'gradient'"):
        plant([Fault("kill", "gradient")], tmp_path)


def test_plans_are_those_of_their_seed():
    assert flips.plan(1, 20, "batchnorm") == flips.plan(1, 20, "batchnorm") != flips.plan(2, 20, "batchnorm")
    assert [fault.kind for fault in flips.plan(1, 3, "transformer")] == ["slow", "flip"] * 3


@pytest.mark.long
def test_a_few_of_them_are_all_found_and_named_and_the_weights_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(flips, "run", fork_run)
    outcome = flips.under(flips.plan(5, 4, "batchnorm"), "batchnorm", 12, tmp_path, timeout_s=100.0)
    assert outcome.good, outcome.errors
    assert len(outcome.struck) == 4
