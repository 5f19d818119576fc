"""Requests from fields, without a server."""

import pytest

from evenstep.core.errors import RefusedError
from evenstep.server.service.requests import CarryOrder, Get, Put, Update, from_query, parse


def test_what_is_left_out_or_null_has_its_default():
    assert parse("get", {}) == parse("get", {"names": None, "since": None}) == Get()
    assert parse("put", {"worker": "w", "optimizer": None}) == Put("w")


def test_fields_become_values():
    spans, options = [[0, 2], [2, 3]], [{"lr": 0.5, "betas": [0.9, 0.99]}]
    found = parse(
        "update", {"worker": "w", "sequence": 3, "shards": 3, "spans": spans, "options": options, "wait_s": 2}
    )
    assert found == Update("w", 3, shards=3, spans=((0, 2), (2, 3)), options=(options[0],), wait_s=2.0)
    assert parse("order", {"order": [[4, {"w": [7, "s"]}]], "alive": ["w"]}) == CarryOrder(
        order=((4, {"w": (7, "s")}),), alive=("w",)
    )


@pytest.mark.parametrize(
    ("verb", "fields", "sentence"),
    [
        ("dance", {}, "there is no verb 'dance'; expected one of register, leave,"),
        ("status", {"x": 1}, "'status' has no field 'x'; its fields are: none"),
        ("leave", {}, "'leave' came without worker"),
        ("get", {"min_version": True}, "min_version=True, expected a whole number from 0 to 4611686018427387904"),
        ("update", {"worker": "w", "sequence": 0}, "sequence=0, expected a whole number from 1"),
        ("update", {"worker": "w", "sequence": 1, "spans": [[0, 1]]}, "spans came without shards"),
        (
            "update",
            {"worker": "w", "sequence": 1, "shards": 4, "spans": [[1, 3]]},
            "is not a node of the tree over 4 shards",
        ),
        ("update", {"worker": "w", "sequence": 1, "shards": 4, "spans": [[2, 4], [0, 2]]}, "overlap, or are not in"),
        ("update", {"worker": "w", "sequence": 1, "note": "x" * 20000}, "note is longer than 16384 characters"),
        ("put", {"worker": "w", "optimizer": {"class": "SGD"}}, 'expected {"class": ..., "groups": [...]}'),
        ("put", {"worker": "w", "optimizer": {"class": "SGD", "groups": [{"names": 3}]}}, "expected a list of names"),
        ("order", {"order": [[1, {"w": ["x", "s"]}]]}, "sequence='x', expected a whole number"),
    ],
)
def test_what_is_wrong_is_named(verb, fields, sentence):
    with pytest.raises(RefusedError) as refused:
        parse(verb, fields)
    assert sentence in str(refused.value)


def test_an_address_holds_texts_json_and_lists():
    pairs = [("worker", "17"), ("sequence", "3"), ("buffers", "a,b"), ("kind", "delta"), ("note", '{"x": [1]}')]
    assert from_query("update", pairs) == {
        "worker": "17", "sequence": 3, "buffers": ["a", "b"], "kind": "delta", "note": {"x": [1]},
    }  # fmt: skip
    assert from_query("get", [("names", '["a"]')]) == {"names": ["a"]}
    for pairs, sentence in {
        (("min_version", "x"),): "min_version='x' is not JSON",
        (("since", "1"), ("since", "1")): "since was given twice",
        (("place_only", "true"),): "'get' has no field 'place_only'",
        (("since", "1e999"),): "is not JSON: 1e999 is too large a number",
    }.items():
        with pytest.raises(RefusedError) as refused:
            from_query("get", pairs)
        assert sentence in str(refused.value)
