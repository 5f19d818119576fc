import math

import pytest

from evenstep.core.config import DEFAULT_SHARDS, RunConfig
from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError

USUAL = {
    "seed": 0,
    "threads": 1,
    "device": "cpu",
    "timeout_s": 300.0,
    "quiet": False,
    "on_nondeterminism": "error",
}


def resolve(env: Environment | None = None, shards: int | None = None, **changes: object) -> RunConfig:
    return RunConfig.resolve(env or Environment(), shards=shards, **{**USUAL, **changes})


def test_the_argument_beats_the_environment_which_beats_the_default():
    assert resolve().shards == DEFAULT_SHARDS
    assert resolve(Environment(shards=4)).shards == 4
    assert resolve(shards=6).shards == 6
    assert resolve(Environment(shards=6), shards=6).shards == 6


def test_a_contradiction_about_shards_is_an_error_not_a_choice():
    with pytest.raises(ConfigError, match=r"--shards 4 but the script says Run\(shards=6\)"):
        resolve(Environment(shards=4), shards=6)


def test_more_workers_than_shards_are_refused_with_both_remedies():
    with pytest.raises(ConfigError) as caught:
        resolve(Environment(worker=2, num_workers=3), shards=2)
    assert "3 workers but only 2 shards" in str(caught.value)
    assert "-n 2, or Run(shards=3)" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": 0},
        {"shards": -1},
        {"shards": 257},
        {"shards": 2.0},
        {"shards": "8"},
        {"threads": 0},
        {"threads": 1.5},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": "0"},
        {"timeout_s": 0},
        {"timeout_s": -3.0},
        {"timeout_s": math.nan},
        {"timeout_s": "long"},
        {"on_nondeterminism": "ignore"},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_named_with_what_was_expected(changes):
    ((name, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"{name}={value!r}, expected"):
        resolve(**changes)


def test_no_shards_on_the_command_line_is_an_error_too():
    with pytest.raises(ConfigError, match="shards=0, expected"):
        resolve(Environment(shards=0))


def test_the_arithmetic_is_said_by_script_or_command_line_and_not_differently():
    assert resolve().arithmetic == "native"
    assert resolve(Environment(arithmetic="portable")).arithmetic == "portable"
    assert resolve(arithmetic="portable").arithmetic == "portable"
    with pytest.raises(ConfigError, match=r"--arithmetic portable but the script says Run\(arithmetic='native'\)"):
        resolve(Environment(arithmetic="portable"), arithmetic="native")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arithmetic": "exact"}, "expected one of 'native', 'portable'"),
        ({"arithmetic": "portable", "threads": 2}, "threads=2 with arithmetic='portable', expected 1"),
        ({"arithmetic": "portable", "device": "cuda"}, "device='cuda' with arithmetic='portable', expected 'cpu'"),
    ],
)
def test_what_cannot_be_portable_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        resolve(**changes)
