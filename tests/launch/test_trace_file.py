"""The file of a trace: JSON that is whole after every write, whatever the disk does; all times are the head's."""

import errno
import json
import os
import time
from dataclasses import replace
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
from evenstep.plan.groups import Standing


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


def test_machines_are_processes_and_workers_threads_by_the_clock_of_the_head(tmp_path, console):
    path, now = tmp_path / "trace.json", time.monotonic_ns()
    file, lines = opened(path, console)
    waits = Span(now + 5_000_000, 2_000, 1, Kind.WAIT, "")
    tag = Span(now + 5_000_000, 3_000, -1, Kind.EXCHANGE, "step 12: result")
    lines.add(0, "head", [piece(waits, tag)], 0)
    ahead_ns = 7 * 10**15
    far = Span(now + ahead_ns + 5_000_000, 2_000, -1, Kind.UPDATE, "")
    lines.add(2, "far", [piece(far, place=1, pid=55), piece(far, place=1, pid=56)], ahead_ns)
    file.close()
    found = [event for event in events(path) if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"]) for e in found] == [
        (1, 100, "wait for worker 1"),
        (1, 100, "result"),
        (3, 55, "update"),
        (3, 56, "update"),
    ]
    assert max(e["ts"] for e in found) - min(e["ts"] for e in found) < 0.01, "they happened at the same time"
    assert [e["dur"] for e in found] == [2.0, 3.0, 2.0, 2.0]
    names = [(e["pid"], e["args"]["name"]) for e in events(path) if e["name"] in ("process_name", "thread_name")]
    assert names == [
        (1, "supervisor"),
        (1, "machine 0 (head)"),
        (1, "worker 0 (pid 100)"),
        (3, "machine 2 (far)"),
        (3, "worker 1 (pid 55)"),
        (3, "worker 1 (pid 56)"),
    ]


def test_groups_are_processes_on_one_clock_and_do_not_mix(tmp_path, console):
    path, now = tmp_path / "trace.json", time.monotonic_ns()
    file, _ = opened(path, console)
    job = Job("train.py", (), 1, began_ns=now)
    for group in range(2):
        standing = Standing(group, 2, 0, [[{"memory": "there"}]], None, True, "token")
        said = Console(None, 1, group)
        lines = TraceLines(file.append, replace(job, standing=standing), said)
        lines.add(0, "host", [piece(Span(now + 5_000, 2_000, -1, Kind.UPDATE, ""), pid=70 + group)], 0)
        said.say(f"of {group}")
        lines.finish()
    file.close()
    found = [(e["pid"], e["tid"], e["ts"]) for e in events(path) if e["ph"] == "X"]
    assert found == [(2, 70, 5.0), (3, 71, 5.0)]
    marks = [(e["pid"], e["s"], e["name"]) for e in events(path) if e["ph"] == "i"]
    assert marks == [(2, "p", "of 0"), (2, "p", "group 0 ends"), (3, "p", "of 1"), (3, "p", "group 1 ends")]
    assert not has_ended(events(path)), "the run ends when the launcher says so"
    named = [(e["pid"], e["args"]) for e in events(path) if e["name"] in ("process_name", "thread_name")]
    assert named == [
        (1, {"name": "supervisor"}),
        (2, {"name": "supervisor of group 0"}),
        (2, {"name": "group 0 (host)"}),
        (2, {"name": "worker 0 (pid 70)", "worker": 0, "group": 0}),
        (3, {"name": "supervisor of group 1"}),
        (3, {"name": "group 1 (host)"}),
        (3, {"name": "worker 0 (pid 71)", "worker": 0, "group": 1}),
    ]


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


def test_spans_that_are_missing_are_said(tmp_path, console, capsys):
    file, lines = opened(tmp_path / "trace.json", console)
    lines.add(0, "host", [piece(Span(1, 0, 17, Kind.LOST, ""))], 0)
    lines.finish()
    file.close()
    assert "17 spans are missing" in capsys.readouterr().err


def test_what_is_no_trace_is_not_replaced(tmp_path, console):
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(ConfigError, match=r"train\.py exists and is not a trace, so it is not replaced; name another"):
        TraceFile(tmp_path / "train.py", "other.py", console.say)
    assert (tmp_path / "train.py").read_text() == "import torch\n"


@pytest.mark.parametrize("place", ["/nowhere/trace.json", "/"])
def test_a_place_that_cannot_be_written_is_one_sentence(place, console):
    with pytest.raises(ConfigError, match=f"--trace: cannot write {place}: .*; name another file"):
        TraceFile(Path(place), "train.py", console.say)
