"""What `checkpoint.json` says is checked where it enters: its checksum, its format, every field."""

import json

import pytest

from evenstep.core.errors import CheckpointError
from evenstep.run.facts import pack, read_facts, seal, unpack

STEM = "state-12-0123abcd"
RIGHT = {
    "version": 12, "shards": 4, "seed": 0, "optimizers": 1, "position": {"epoch": 0, "batch": 3}, "data": [[8, None]],
    "values": {}, "groups": [], "tracked": {}, "fingerprint": "0" * 64, "state": f"{STEM}.safetensors",
    "sha256": "1" * 64, "journal": None, "journal_sha256": None, "written_s": 1.5,
}  # fmt: skip


def written(tmp_path, facts):
    path = tmp_path / "checkpoint.json"
    path.write_bytes(seal(facts))
    return path


def test_what_is_sealed_is_read(tmp_path):
    found = read_facts(written(tmp_path, RIGHT))
    assert {name: found[name] for name in RIGHT} == RIGHT


def test_a_flipped_bit_anywhere_is_found(tmp_path):
    path = written(tmp_path, RIGHT)
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            found = read_facts(path)
        except CheckpointError:
            continue
        assert {name: found[name] for name in RIGHT} == RIGHT, "between the fields there is space, which says nothing"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("version", -1, "a number of steps"),
        ("version", True, "a number of steps"),
        ("position", {"epoch": 0}, "an epoch and a batch"),
        ("data", [[1]], "pairs of sizes"),
        ("state", "../../etc/passwd", "the name of a state"),
        ("sha256", "xyz", "64 hex digits"),
        ("groups", [{"a": 1, "b": 2}], "options of optimizers"),
        ("written_s", "now", "a time"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(tmp_path, name, value, expected):
    with pytest.raises(CheckpointError, match=f"as '{name}', expected {expected}"):
        read_facts(written(tmp_path, {**RIGHT, name: value}))


def test_a_field_that_is_missing_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="says nothing as 'seed'"):
        read_facts(written(tmp_path, {name: value for name, value in RIGHT.items() if name != "seed"}))


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', "[" * 100_000, "\x00\xff"])
def test_other_files_are_no_checkpoints(tmp_path, text):
    path = tmp_path / "checkpoint.json"
    path.write_text(text)
    with pytest.raises(CheckpointError):
        read_facts(path)


def test_none_there_is_not_an_altered_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_facts(tmp_path / "checkpoint.json")


def test_plain_values_keep_what_json_would_lose():
    value = {1: (2, [None, {"a": ((),)}]), "text": 0.1, (3, 4): True}
    assert unpack(json.loads(json.dumps(pack(value)))) == value


def test_what_could_never_be_read_again_is_not_written():
    with pytest.raises(CheckpointError, match=r"takes \d+ bytes as JSON, expected at most"):
        seal({"tracked": "x" * (1 << 26)})
