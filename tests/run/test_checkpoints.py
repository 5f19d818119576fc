"""When a checkpoint is due, which are kept, and what happens when the disk does not want them."""

import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.run import checkpoints as module
from evenstep.run.checkpoints import Checkpoints, Snapshot

FACTS = {
    "shards": 4, "seed": 0, "optimizers": 1, "position": None, "data": [], "values": {}, "groups": [], "tracked": {},
}  # fmt: skip


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def snapshot(version):
    return Snapshot({"a": torch.arange(3.0)}, {**FACTS, "version": version}, b"")


@pytest.mark.parametrize("every", [0, -1, "soon", "5 parsecs", 1.5])
def test_an_interval_that_makes_no_sense_is_refused(tmp_path, every):
    with pytest.raises(ConfigError, match="every="):
        Checkpoints(tmp_path, every, 1)


def test_so_must_be_the_number_to_keep(tmp_path):
    with pytest.raises(ConfigError, match="keep=0, expected a whole number above 0"):
        Checkpoints(tmp_path, 1, 0)


def test_by_steps_one_is_due_whenever_a_multiple_was_passed(tmp_path):
    saves = Checkpoints(tmp_path, 3, 9)
    assert [v for v in range(1, 8) if saves.due(v, 0)] == [3, 4, 5, 6, 7]
    saves.write(snapshot(4), wait=True)
    assert [v for v in range(5, 10) if saves.due(v, 0)] == [6, 7, 8, 9]


def test_by_time_one_is_due_when_it_has_passed(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    saves = Checkpoints(tmp_path, "2min", 1)
    assert not saves.due(1, 0)
    clock.now += 120
    assert saves.due(1, 0)


def test_what_the_supervisor_asks_for_is_due_once(tmp_path):
    saves = Checkpoints(tmp_path, 100, 1)
    assert saves.due(1, 1)
    assert not saves.due(2, 1)
    assert saves.due(3, 2)


def test_the_newest_are_kept_and_what_others_have_put_there_stays(tmp_path):
    (tmp_path / "step-000000001").mkdir()
    (tmp_path / "step-000000001" / "notes.txt").write_text("mine")
    saves = Checkpoints(tmp_path, 1, 2)
    for version in (2, 3, 4):
        saves.write(snapshot(version), wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000001", "step-000000003", "step-000000004"]
    assert saves.newest() == tmp_path / "step-000000004"
    assert (tmp_path / "step-000000001" / "notes.txt").exists()


def test_what_cannot_be_written_is_said_and_tried_again(tmp_path, monkeypatch, capfd):
    clock = Clock(monkeypatch)
    (tmp_path / "file").write_text("")
    saves = Checkpoints(tmp_path / "file", 1, 1)
    saves.write(snapshot(1), wait=True)
    assert "CHECKPOINT FAILED, training goes on" in capfd.readouterr().err
    assert not saves.due(2, 0)
    assert saves.is_missing(2)
    clock.now += 5
    assert saves.due(2, 0)
