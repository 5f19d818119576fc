"""What the bits rest on is pinned for a run, looked after in every step, and given back."""

import warnings

import pytest
import torch

from evenstep.arithmetic.processor import Processor
from evenstep.core.errors import NondeterminismError
from evenstep.engine import determinism as engine_determinism
from evenstep.engine.determinism import Determinism, profile


@pytest.fixture
def pinned(config):
    made = []

    def make(**changes):
        made.append(Determinism(config(**changes)))
        return made[-1]

    yield make
    for determinism in made:
        determinism.restore()


def settings():
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )


def test_a_run_pins_its_settings_and_gives_the_process_its_own_back(config):
    before = settings()
    torch.backends.cudnn.benchmark = True
    determinism = Determinism(config(threads=2))
    assert settings() == (2, True, False, False, False)
    determinism.check()
    determinism.restore()
    assert settings() == (*before[:4], True)
    torch.backends.cudnn.benchmark = before[4]


def test_an_operation_without_a_deterministic_kernel_raises(pinned):
    pinned()
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))


CHANGES = {
    "get_num_threads": lambda: torch.set_num_threads(3),
    "are_deterministic_algorithms_enabled": lambda: torch.use_deterministic_algorithms(False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_user_code_that_changes_a_setting_is_told_which(pinned, name):
    determinism = pinned()
    CHANGES[name]()
    with pytest.raises(NondeterminismError, match=rf"{name}.* but the run began with"):
        determinism.check()


def test_a_run_that_only_warns_does_so_once(pinned):
    determinism = pinned(on_nondeterminism="warn")
    torch.set_num_threads(3)
    with pytest.warns(UserWarning, match="but the run began with 1"):
        determinism.check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        determinism.check()


def test_what_must_be_alike_is_what_the_bits_depend_on(config):
    mine = profile(config())
    assert mine == profile(config(timeout_s=1.0, quiet=False))
    for change in ({"shards": 5}, {"seed": 4}, {"threads": 2}):
        assert mine != profile(config(**change))
    assert {"torch", "processor"} <= mine.keys()


def test_workers_on_unlike_processors_may_meet_only_with_portable_arithmetic(config, monkeypatch):
    mine, portable = profile(config()), profile(config(arithmetic="portable"))
    other = Processor("AnotherMaker", "Another", "family 1, model 2", ("avx2", "fma"))
    monkeypatch.setattr(engine_determinism, "read_processor", lambda: other)
    assert profile(config())["processor"].startswith("AnotherMaker, family 1, model 2, avx2 fma")
    assert profile(config()) != mine
    assert profile(config(arithmetic="portable")) == portable
