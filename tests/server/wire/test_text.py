"""JSON from strangers."""

import json

import pytest

from evenstep.core.errors import RefusedError
from evenstep.server.wire.text import read_json, read_value, write_json


@pytest.mark.parametrize("value", [{}, {"a": [1, 2.5, None, True, "x\u00e9\U0001f600"]}, {"a": {"b": [[]]}}])
def test_what_is_written_is_read(value):
    text = write_json(value)
    assert text == json.dumps(value, separators=(",", ":")).encode()
    assert read_json(text, "it") == read_json(b" \n" + text + b" ", "it") == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"{} x", "it is not JSON"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b'{"a": 1e999}', "1e999 is too large a number"),
        (b'{"a": 1, "a": 1}', "a name occurs twice"),
        (rb'{"a": "\ud800"}', "half of a character"),
        (rb'{"\udc00": 1}', "half of a character"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "it is not JSON"),
        (b"[]", "expected an object"),
    ],
)
def test_what_is_wrong_is_one_sentence(text, words):
    with pytest.raises(RefusedError, match=words) as refused:
        read_json(text, "it")
    assert "\n" not in str(refused.value)


def test_whole_characters_are_taken_however_they_are_written():
    assert read_value(r'"\ud83d\ude00\u00e9"', "it") == "\U0001f600\u00e9"
