"""The file of a trace: JSON that is whole after every write, whatever the disk does; all times are the head's."""

import errno
import json
import os
from pathlib import Path

import pytest

from evenstep.core.errors import ConfigError
from evenstep.exchange.tracing import Kind, Span, pack
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.trace_file import TraceFile, mend
from evenstep.launch.trace_lines import TraceLines
from evenstep.launch.trails import TrailPiece
from evenstep.picture.timeline import has_ended


@pytest.fixture
def console():
    return Console(None, 1)


def opened(path, console):
    """The file of a trace, and what makes its events."""
    file = TraceFile(path, "train.py", console.say)
    return file, TraceLines(file.append, Job("train.py", (), 2, trace=path), console)


def piece(*spans, place=0, pid=100):
    return TrailPiece(place, pid, b"".join(map(pack, spans)))


def events(path):
    return json.loads(path.read_text())["traceEvents"]


def test_the_file_is_whole_after_every_write(tmp_path, console):
    path = tmp_path / "trace.json"
    for _ in range(2):  # one that is there is replaced
        file, lines = opened(path, console)
        lines.add(0, "host", [piece(*[Span(1, 1, 1, Kind.UPDATE, "")] * 100)], 0)
        file.close()
    file, lines = opened(path, console)
    assert json.loads(path.read_text())["otherData"]["script"] == "train.py"
    for number in range(5):
        lines.add(0, "host", [piece(Span(number, 1, 3, Kind.FORWARD, ""))], 0)
        assert [event["name"] for event in events(path) if event["ph"] == "X"] == ["forward, shard 3"] * (number + 1)
    console.say('worker 1 "was" killed')
    lines.finish()
    file.close()
    assert [event["name"] for event in events(path)[-2:]] == ['worker 1 "was" killed', "the run ends"]
    assert has_ended(events(path))


def test_a_write_that_was_cut_anywhere_is_mended_and_costs_no_earlier_event(tmp_path, console):
    path, cut = tmp_path / "trace.json", tmp_path / "cut.json"
    file, lines = opened(path, console)
    lines.add(0, "host", [piece(*[Span(1, 1, 1, Kind.UPDATE, "")] * 3)], 0)
    before = path.read_bytes()
    lines.add(0, "host", [piece(*[Span(2, 1, 1, Kind.FORWARD, "")] * 3)], 0)
    file.close()
    after, known = path.read_bytes(), len(json.loads(before)["traceEvents"])
    begin = len(before) - len(b"\n]}\n")
    for end in range(begin, len(after) + 1):
        cut.write_bytes(after[:end] + before[end:])  # new bytes up to here, then what there was
        with cut.open("r+b") as torn:
            mend(torn.fileno())
        assert len(events(cut)) >= known - (end - begin <= len(b"\n]}\n"))
    assert cut.read_bytes() == after


def test_a_full_disk_leaves_what_was_there_whole_and_is_said_once(tmp_path, console, monkeypatch, capsys):
    path, write = tmp_path / "trace.json", os.pwrite
    file, lines = opened(path, console)
    lines.add(0, "host", [piece(Span(1, 1, 1, Kind.UPDATE, ""))], 0)

    def full(fd, data, place):
        if len(data) > 20:
            write(fd, data[:20], place)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(3):
        lines.add(0, "host", [piece(Span(2, 1, 1, Kind.UPDATE, ""))], 0)
    file.close()
    assert len([event for event in events(path) if event["ph"] == "X"]) == 1
    assert capsys.readouterr().err.count("can no longer be written: No space left on device") == 1


def test_what_is_no_trace_is_not_replaced(tmp_path, console):
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(ConfigError, match=r"train\.py exists and is not a trace, so it is not replaced; name another"):
        TraceFile(tmp_path / "train.py", "other.py", console.say)
    assert (tmp_path / "train.py").read_text() == "import torch\n"


@pytest.mark.parametrize("place", ["/nowhere/trace.json", "/"])
def test_a_place_that_cannot_be_written_is_one_sentence(place, console):
    with pytest.raises(ConfigError, match=f"--trace: cannot write {place}: .*; name another file"):
        TraceFile(Path(place), "train.py", console.say)
