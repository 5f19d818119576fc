"""What the events of a trace say: who did what, when, by the clock of the head."""

import json
import time
from dataclasses import replace

import pytest

from evenstep.exchange.tracing import Kind, Span, pack
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.trace_lines import TraceLines, in_reports
from evenstep.launch.trails import TrailPiece
from evenstep.picture.timeline import has_ended
from evenstep.plan.groups import Standing


@pytest.fixture
def console():
    return Console(None, 1)


def piece(*spans, place=0, pid=100):
    return TrailPiece(place, pid, b"".join(map(pack, spans)))


def events(lines):
    return [json.loads(line) for line in lines]


def test_machines_are_processes_and_workers_threads_by_the_clock_of_the_head(console):
    written, now = [], time.monotonic_ns()
    lines = TraceLines(written.extend, Job("train.py", (), 2), console)
    waits = Span(now + 5_000_000, 2_000, 1, Kind.WAIT, "")
    tag = Span(now + 5_000_000, 3_000, -1, Kind.EXCHANGE, "step 12: result")
    lines.add(0, "head", [piece(waits, tag)], 0)
    ahead_ns = 7 * 10**15
    far = Span(now + ahead_ns + 5_000_000, 2_000, -1, Kind.UPDATE, "")
    lines.add(2, "far", [piece(far, place=1, pid=55), piece(far, place=1, pid=56)], ahead_ns)
    found = [event for event in events(written) if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["name"]) for e in found] == [
        (1, 100, "wait for worker 1"),
        (1, 100, "result"),
        (3, 55, "update"),
        (3, 56, "update"),
    ]
    assert max(e["ts"] for e in found) - min(e["ts"] for e in found) < 0.01, "they happened at the same time"
    assert [e["dur"] for e in found] == [2.0, 3.0, 2.0, 2.0]
    names = [(e["pid"], e["args"]["name"]) for e in events(written) if e["name"] in ("process_name", "thread_name")]
    assert names == [
        (1, "machine 0 (head)"),
        (1, "worker 0 (pid 100)"),
        (3, "machine 2 (far)"),
        (3, "worker 1 (pid 55)"),
        (3, "worker 1 (pid 56)"),
    ]


def test_groups_are_processes_on_one_clock_and_do_not_mix(console):
    written, now = [], time.monotonic_ns()
    job = Job("train.py", (), 1, began_ns=now)
    for group in range(2):
        standing = Standing(group, 2, 0, [[{"memory": "there"}]], None, True, "token")
        said = Console(None, 1, group)
        lines = TraceLines(written.extend, replace(job, standing=standing), said)
        lines.add(0, "host", [piece(Span(now + 5_000, 2_000, -1, Kind.UPDATE, ""), pid=70 + group)], 0)
        said.say(f"of {group}")
        lines.finish()
    found = [(e["pid"], e["tid"], e["ts"]) for e in events(written) if e["ph"] == "X"]
    assert found == [(2, 70, 5.0), (3, 71, 5.0)]
    marks = [(e["pid"], e["s"], e["name"]) for e in events(written) if e["ph"] == "i"]
    assert marks == [(2, "p", "of 0"), (2, "p", "group 0 ends"), (3, "p", "of 1"), (3, "p", "group 1 ends")]
    assert not has_ended(events(written)), "the run ends when the launcher says so"
    named = [(e["pid"], e["args"]) for e in events(written) if e["name"] in ("process_name", "thread_name")]
    assert named == [
        (2, {"name": "supervisor of group 0"}),
        (2, {"name": "group 0 (host)"}),
        (2, {"name": "worker 0 (pid 70)", "worker": 0, "group": 0}),
        (3, {"name": "supervisor of group 1"}),
        (3, {"name": "group 1 (host)"}),
        (3, {"name": "worker 0 (pid 71)", "worker": 0, "group": 1}),
    ]


def test_spans_that_are_missing_are_said(console, capsys):
    lines = TraceLines([].extend, Job("train.py", (), 2), console)
    lines.add(0, "host", [piece(Span(1, 0, 17, Kind.LOST, ""))], 0)
    lines.finish()
    assert "17 spans are missing" in capsys.readouterr().err


def test_what_another_process_writes_is_reported_in_pieces_of_some_hundred_events():
    reports = []
    in_reports(reports.append)([str(n) for n in range(1200)])
    assert [len(report["trace"]) for report in reports] == [500, 500, 200]
    assert [line for report in reports for line in report["trace"]] == [str(n) for n in range(1200)]
