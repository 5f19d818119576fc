"""What becomes of an attempt, who gets how many workers, and versions that differ: decided without any process."""

from dataclasses import asdict

import pytest

from evenstep.agents.orders import End, Kind, Order, compare_nodes, judge, share_out
from evenstep.core.errors import ConfigError


def end(worker, code, error=None):
    return End(worker, code, f"worker {worker} ended with {code}", error)


def test_an_attempt_is_done_failed_or_lost():
    assert judge([end(0, 0), end(1, 0)]).kind is Kind.DONE
    failed = judge([end(0, 7), end(1, 1, "Traceback ...")])
    assert (failed.kind, failed.text, failed.code) == (Kind.FAILED, "Traceback ...", 1)
    lost = judge([end(0, 7), end(1, -9), end(2, 7)])
    assert (lost.kind, lost.text) == (Kind.LOST, "worker 1 ended with -9")
    assert judge([end(0, 6, "nobody came"), end(1, 7)]).kind is Kind.LOST
    assert judge([end(0, 7), end(1, 7)]).kind is Kind.LOST, "the one that they miss was on a node that is gone"


def test_workers_go_to_as_few_nodes_as_possible():
    assert share_out([2, 4, 1], 1, 5) == [1, 4, 0]
    assert share_out([1, 1, 1], 2, 3) == [1, 1, 1]
    assert share_out([1, 1], 1, 8) == [1, 1]
    with pytest.raises(ConfigError, match="there is room for 2 workers, expected at least 3"):
        share_out([1, 1], 3, 8)


def test_nodes_that_differ_are_named():
    facts = [{"node": "a", "python": "3.11.7", "torch": "2.13.0"}, {"node": "b", "python": "3.11.7", "torch": "2.12.0"}]
    compare_nodes(facts[:1] * 2)
    with pytest.raises(
        ConfigError, match=r"node b has torch 2\.12\.0 but node a has 2\.13\.0; all nodes need the same"
    ):
        compare_nodes(facts)


def test_an_order_survives_its_way():
    order = Order("train.py", ("-x",), (0, 1), 3, "10.0.0.1", 7000, resume=True)
    assert Order.of({**asdict(order), "args": ["-x"], "workers": [0, 1]}) == order
    assert order.with_script("other.py", ()).script == "other.py"
