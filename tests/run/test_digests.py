"""What `evenstep verify` reads: what the first step begins with, every step, the fingerprint."""

import json
from types import SimpleNamespace

import pytest

from evenstep.run.digests import DigestWriter


def engine_of(rank=0, version=0, took_part=True):
    return SimpleNamespace(
        version=version,
        group=SimpleNamespace(rank=rank),
        ledger=SimpleNamespace(took_part=took_part),
        state=SimpleNamespace(digests=lambda: {"model.a": "12"}),
    )


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_it_notes_the_beginning_every_step_and_the_end(tmp_path):
    path, engine = tmp_path / "digests", engine_of()
    writer = DigestWriter(path, engine)
    for version in (1, 2):
        writer.before_step()
        engine.version = version
        writer.after_step()
    writer.end("abc")
    assert [record.get("step") for record in records(path)] == [0, 1, 2, None]
    assert records(path)[1]["digests"] == {"model.a": "12"}
    assert records(path)[3] == {"fingerprint": "abc"}


@pytest.mark.parametrize("engine", [engine_of(rank=1), engine_of(took_part=False)], ids=["another", "catching up"])
def test_steps_are_noted_by_the_first_worker_that_does_them(tmp_path, engine):
    writer = DigestWriter(tmp_path / "digests", engine)
    writer.before_step()
    writer.after_step()
    assert records(tmp_path / "digests") == []


def test_nobody_asked():
    DigestWriter(None, engine_of()).after_step()
    DigestWriter(None, engine_of()).end("abc")
