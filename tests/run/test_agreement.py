"""What must fit together for a run to begin."""

import sys

import pytest

from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError
from evenstep.engine.determinism import profile
from evenstep.run import agreement
from evenstep.run.agreement import _compare, agree, check_arithmetic, find_standing
from evenstep.run.server import Server


def test_a_run_has_servers_of_the_command_line_or_of_the_script():
    assert find_standing(Environment(), None) is None
    assert find_standing(Environment(), Server("http://127.0.0.1:1")) is None
    with pytest.raises(ConfigError, match=r"the script says Run\(server='http://127.0.0.1:1'\): give one of the two"):
        find_standing(Environment(standing="{}"), Server("http://127.0.0.1:1"))


def test_portable_arithmetic_goes_with_no_server(config, monkeypatch):
    insisted = []
    monkeypatch.setattr(agreement.settings, "insist", lambda *_: insisted.append(1))
    check_arithmetic(config(), Environment(), sys._getframe(), served=True)
    portable = config(arithmetic="portable")
    with pytest.raises(ConfigError, match="leave out the server, or use arithmetic='native'"):
        check_arithmetic(portable, Environment(), sys._getframe(), served=True)
    assert not insisted
    check_arithmetic(portable, Environment(), sys._getframe(), served=False)
    assert insisted


def test_a_worker_that_computes_otherwise_is_named(holdings_of, monkeypatch):
    (holdings,) = holdings_of()
    mine = profile(holdings.config)
    first, second = mine, {**mine, "seed": 8}
    monkeypatch.setattr(holdings.group, "gather_json", lambda tag, value: [first, second])
    monkeypatch.setattr(holdings.group, "members", [0, 3])
    with pytest.raises(ConfigError, match=f"worker 3 has seed=8 but worker 0 has {mine['seed']}; all workers must run"):
        agree(holdings.ledger, holdings.config, 0)


def test_alike_workers_agree(holdings_of):
    (holdings,) = holdings_of()
    agree(holdings.ledger, holdings.config, 0)
    assert holdings.ledger.done == 1


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
