"""What the log of a server says comes back as it was, and can be said in words whatever it holds."""

import json

import pytest
import torch

from evenstep.server.store import records
from evenstep.server.store.following import Staged
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.state import Applied
from evenstep.server.wire.slices import ServerPlace, Slices
from evenstep.server.wire.tensors import ParameterLayout, Spec


def through(record):
    """A record as it comes back from a file: facts by JSON, tensors by name."""
    facts, tensors = record
    return json.loads(json.dumps(facts)), dict(tensors)


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("options", [None, ({"lr": 0.5}, {})])
def test_an_applied_update_comes_back(options):
    tensors, buffers = {"weight": torch.ones(2)}, {"mean": torch.zeros(3)}
    applied = Applied("gradient", 4, tensors, buffers, {"a": 7}, [{"loss": 1.5}], options, sessions={"a": "x"})
    found = records.to_applied(through(records.of_applied(applied)))
    assert same(found.tensors, tensors)
    assert same(found.buffers, buffers)
    assert (found.kind, found.version, found.sequences, found.notes) == ("gradient", 4, {"a": 7}, [{"loss": 1.5}])
    assert (found.options, found.sessions) == (options, {"a": "x"})


def test_a_staged_update_of_tree_nodes_comes_back():
    nodes = [((0, 2), {"weight": torch.ones(2)}), ((2, 3), {"weight": torch.zeros(2), "bias": torch.ones(1)})]
    part = Contribution({}, 5, nodes, 3, {"mean": torch.full((1,), 9.0)}, None, None)
    record = through(records.of_staged("a", "life 2", Staged(7, "gradient", part, None, ())))
    who, found = records.to_staged(record, ServerPlace(1, 2, "set"))
    assert who == ("a", "life 2")
    assert (found.sequence, found.kind, found.part.samples, found.part.num_shards) == (7, "gradient", 5, 3)
    assert [span for span, _ in found.part.nodes] == [(0, 2), (2, 3)]
    assert all(same(ours, theirs) for (_, ours), (_, theirs) in zip(found.part.nodes, nodes, strict=True))
    assert same(found.part.buffers, part.buffers)


def test_a_staged_put_brings_its_layout_along():
    slices = Slices(ParameterLayout({"weight": Spec.of(torch.zeros(4))}), 2, split=True)
    part = Contribution({"weight": torch.ones(4)}, 1)
    record = through(records.of_staged("a", "", Staged(1, "put", part, slices, ("mean",))))
    _, found = records.to_staged(record, ServerPlace(1, 2, "set"))
    assert found.slices.fingerprint == slices.fingerprint
    assert found.buffers == ("mean",)


def test_a_decision_comes_back():
    decision = (4, {"a": (7, "x"), "b": (1, "")})
    facts, tensors = through(records.of_decided(decision))
    assert records.to_decided(facts) == decision
    assert tensors == {}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "what cannot be read"),
        (({}, {}), "version None"),
        (({"kind": "staged", "who": ["a", "x", 1]}, {}), "an update of worker 'a' that waits for server 0"),
        (({"kind": "decided", "version": 4, "who": {"a": [7, "x"], "b": [1, ""]}}, {}), "version 4, by 'a', 'b'"),
        (({"kind": "delta", "version": 3, "sequences": {"c": 1}}, {}), "version 3, by 'c'"),
    ],
)
def test_a_record_is_said_in_words(record, words):
    assert records.describe(record) == words
