"""What must be alike on all machines; what differs is named (`test_door.py` has the refusal)."""

import hashlib

import pytest

from evenstep.core.errors import ConfigError
from evenstep.launch.likeness import difference, likeness


def test_a_machine_is_like_itself_and_json_keeps_that(tmp_path):
    import json

    script = tmp_path / "train.py"
    script.write_text("print(1)")
    ours = likeness(script, None)
    assert ours[f"script {script} (SHA-256)"] == hashlib.sha256(b"print(1)").hexdigest()[:16]
    assert difference(json.loads(json.dumps(ours)), ours) is None


@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ({"torch": "1"}, "torch is 1 there, but 2 on the head"),
        ({}, "torch is not set there, but 2 on the head"),
        ({"torch": "2", "more": "x" * 200}, f"more is {'x' * 80} there, but not set on the head"),
    ],
)
def test_the_first_difference_is_named_and_what_strangers_say_is_cut(theirs, sentence):
    assert difference(theirs, {"torch": "2"}) == sentence


def test_a_script_that_is_not_here_is_named_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"it must be on every machine: start `evenstep join` in a directory"):
        likeness(tmp_path / "none.py", 8)


def test_a_module_is_found_without_being_run(tmp_path, monkeypatch):
    (tmp_path / "trains_when_imported.py").write_text("raise AssertionError('only workers run it')")
    monkeypatch.syspath_prepend(tmp_path)
    expected = hashlib.sha256((tmp_path / "trains_when_imported.py").read_bytes()).hexdigest()[:16]
    assert likeness("trains_when_imported", 8)["script trains_when_imported (SHA-256)"] == expected
