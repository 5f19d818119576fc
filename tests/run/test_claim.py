"""A directory takes the checkpoints of one run at a time."""

import json
import os
import socket

import pytest

from evenstep.core.errors import CheckpointError
from evenstep.run import claim as module
from evenstep.run.claim import Claim


@pytest.fixture
def taken(tmp_path):
    """Takes a claim, which is released in the end."""
    claims = []

    def take(run, directory=tmp_path):
        claims.append(Claim(directory, run))
        claims[-1].take()
        return claims[-1]

    yield take
    for claim in claims:
        claim.release()


def test_workers_of_one_run_share_it_and_the_file_says_whose_it_is(taken, tmp_path):
    taken("one")
    taken("one")
    said = json.loads((tmp_path / "evenstep.lock").read_text())
    assert said == {"run": "one", "pid": os.getpid(), "host": socket.gethostname()}


def test_another_run_is_told_whose_it_is(taken, tmp_path):
    taken("one")
    with pytest.raises(CheckpointError, match=f"is taken: the run of process {os.getpid()} on "):
        Claim(tmp_path, "two").take()
    assert json.loads((tmp_path / "evenstep.lock").read_text())["run"] == "one"


def test_what_was_let_go_of_can_be_taken(taken):
    taken("one").release()
    taken("two").release()
    taken("one")


def test_a_holder_whose_process_has_ended_is_waited_for(taken, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    taken("one")
    words = {"run": "one", "pid": 2**22 + 1, "host": socket.gethostname()}
    (tmp_path / "evenstep.lock").write_text(json.dumps(words))
    with pytest.raises(CheckpointError, match="is taken"):
        Claim(tmp_path, "two").take()


def test_somebody_elses_words_are_nobody_whom_we_know(taken, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    taken("one")
    (tmp_path / "evenstep.lock").write_text("[1, 2")
    with pytest.raises(CheckpointError, match=r"process \? on \?"):
        Claim(tmp_path, "two").take()


def test_where_files_cannot_be_locked_nobody_has_it(taken, tmp_path, capfd):
    (tmp_path / "there" / "evenstep.lock").mkdir(parents=True)
    taken("one", tmp_path / "there")
    assert "cannot be locked against other runs" in capfd.readouterr().err
