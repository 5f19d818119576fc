"""The events of a trace, from what workers did and what their supervisor said.

A *process* of the trace is a machine, or a group of workers; a *thread* is one worker from its start to its end. What a
supervisor says is shown as instants. All times are by the clock of the machine that this is on.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from time import monotonic
from typing import Any

from evenstep.core.events import Event
from evenstep.exchange.tracing import Kind, Span, unpack
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.trails import TrailPiece

__all__ = ["SUPERVISOR", "TraceLines", "in_reports", "name_of"]

SUPERVISOR = 1  # its thread in the trace; no worker has that process id
_STEP = re.compile(r"step \d+: ")  # how the tags of a step's exchanges begin
_MOST_TEXT = 400
_MOST_EVENTS = 500  # in one report


class TraceLines:
    """Makes lines of JSON, an event each.

    Args:
        write: Takes lines.
        job: What is traced, and since when.
        console: Has what the supervisor said, and tells the user what is missing.
    """

    def __init__(self, write: Callable[[Sequence[str]], None], job: Job, console: Console) -> None:
        self._write, self._job, self._console = write, job, console
        self._group = None if job.standing is None else job.standing.group
        self._first = 1 if self._group is None else self._group + 2  # the process of the first machine
        self._said_s, self._lost = 0.0, 0
        self._known: set[tuple[int, int]] = set()
        if self._group is not None:
            write([name_of("thread_name", self._first, SUPERVISOR, f"supervisor of group {self._group}")])

    def add(self, machine: int, name: str, pieces: Iterable[TrailPiece], ahead_ns: int) -> None:
        """Write what workers of a machine did, and what the supervisor has said meanwhile.

        Args:
            machine: The number of the machine.
            name: Its host name.
            pieces: The spans of its workers.
            ahead_ns: How far its clock is ahead of this machine's.
        """
        lines = self._said()
        zero_ns = self._job.began_ns + ahead_ns
        for place, pid, spans in pieces:
            lines += self._introduce(machine, name, place, pid)
            lines += [self._line(span, machine, pid, zero_ns) for span in unpack(spans)]
        if lines:
            self._write(lines)

    def finish(self) -> None:
        """Write what is left and that this is the end, and tell the user if spans are missing."""
        name = "the run ends" if self._group is None else f"group {self._group} ends"
        self._write([*self._said(), self._mark(monotonic(), name, "end")])
        if self._lost:
            self._console.say(f"--trace {self._job.trace}: {self._lost} spans are missing, since they came too fast")

    def _said(self) -> list[str]:
        news = [(when_s, text) for when_s, text in self._console.said if when_s > self._said_s]
        self._said_s = news[-1][0] if news else self._said_s
        return [self._mark(when_s, text[:_MOST_TEXT], "supervisor") for when_s, text in news]

    def _mark(self, when_s: float, name: str, kind: str) -> str:
        across = "g" if self._group is None else "p"  # all processes, or this one
        when = round(1e6 * when_s - self._job.began_ns / 1e3, 3)
        event = {"ph": "i", "s": across, "pid": self._first, "tid": SUPERVISOR, "cat": kind}
        return json.dumps({**event, "ts": when, "name": name})

    def _introduce(self, machine: int, name: str, place: int, pid: int) -> list[str]:
        lines, process = [], self._first + machine
        if (process, 0) not in self._known:
            self._known.add((process, 0))
            what = f"machine {machine}" if self._group is None else f"group {self._group}"
            lines.append(name_of("process_name", process, 0, f"{what} ({name})"))
        if (process, pid) not in self._known:
            self._known.add((process, pid))
            who = {"worker": place} if self._group is None else {"worker": place, "group": self._group}
            lines.append(name_of("thread_name", process, pid, f"worker {place} (pid {pid})", **who))
            order = {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": pid}
            lines.append(json.dumps({**order, "args": {"sort_index": place + 2}}))
        return lines

    def _line(self, span: Span, machine: int, pid: int, zero_ns: int) -> str:
        if span.kind is Kind.LOST:
            self._lost += span.number
        begin, lasted = (span.begin_ns - zero_ns) / 1e3, span.duration_ns / 1e3
        what = _what(span.kind, _STEP.sub("", span.name, count=1), span.number)
        return f'{{"ph":"X","pid":{self._first + machine},"tid":{pid},"ts":{begin:.3f},"dur":{lasted:.3f},{what}}}'


def in_reports(report: Callable[[Event], None]) -> Callable[[Sequence[str]], None]:
    """What takes events if another process writes the trace: a function that reports them to it."""

    def write(lines: Sequence[str]) -> None:
        for first in range(0, len(lines), _MOST_EVENTS):
            report({"trace": lines[first : first + _MOST_EVENTS]})

    return write


def name_of(what: str, process: int, thread: int, name: str, **more: Any) -> str:
    """The event that names a process or a thread."""
    return json.dumps({"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name, **more}})


@lru_cache(maxsize=4096)
def _what(kind: Kind, name: str, number: int) -> str:
    """The part of an event that says what was done."""
    args: dict[str, Any] = {}
    match kind:
        case Kind.FORWARD | Kind.BACKWARD if number >= 0:
            name, args = f"{kind.name.lower()}, shard {number}", {"shard": number}
        case Kind.WAIT if number >= 0:
            name, args = f"wait for worker {number}", {"worker": number}
        case Kind.WAIT:
            name = f"wait for {name}"
        case Kind.UNFINISHED:
            name, args = f"step {number}, unfinished", {"step": number, "in": name}
        case Kind.OPERATION:
            args = {"step": number}
        case Kind.LOST:
            name, args = f"{number} spans are missing here: there was no room", {"spans": number}
        case Kind.RECOVERY:
            name, args = "recovery" if number > 1 else "first generation", {"generation": number}
    return f'"name":{json.dumps(name or kind.name.lower())},"cat":"{kind.name.lower()}","args":{json.dumps(args)}'
