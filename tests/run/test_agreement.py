"""Workers that would compute other bits refuse each other, and are told what would let them work together."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.engine.determinism import profile
from evenstep.run.agreement import _compare


def test_unlike_processors_are_told_of_portable_arithmetic(config):
    mine = profile(config())
    with pytest.raises(ConfigError, match=r"worker 2 has processor='.*AVX.* or with arithmetic='portable'"):
        _compare(2, mine, {**mine, "processor": "AnotherMaker, family 1, model 2"})
    with pytest.raises(ConfigError, match=r"worker 2 has seed=3 but worker 0 has 1; .* kind of machine$"):
        _compare(2, mine, {**mine, "seed": 1})


@pytest.mark.parametrize("first", ["native", "portable"])
def test_workers_of_two_arithmetics_refuse_each_other(config, first):
    native, portable = profile(config()), profile(config(arithmetic="portable"))
    mine, theirs = (portable, native) if first == "native" else (native, portable)
    with pytest.raises(ConfigError, match=rf"worker 1 has arithmetic='.*' but worker 0 has '{first}'"):
        _compare(1, mine, theirs)
