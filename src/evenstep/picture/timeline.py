"""Where the time of a run's steps went, and who waited for whom, from a trace: pure arithmetic over its spans.

Time in nested spans of one worker belongs to the innermost. A wait inside an exchange inside a backward is a wait.
Groups of workers step by themselves, so each has a summary of its own; workers without groups are one group.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PHASES", "Timeline", "has_ended", "read", "render", "requests"]

PHASES = ("load", "forward", "backward", "compute", "exchange", "wait", "update", "commit", "recovery", "operation")
_NAMES = {"operation": "rest of the step", "compute": "rest of computing", "outside": "between steps"}
_MOST_TAGS = 10


@dataclass
class _Span:
    begin: float
    end: float
    phase: str
    name: str
    args: Mapping[str, Any]
    inner: float = 0.0  # how much of its time belongs to spans inside it


@dataclass
class Timeline:
    """A summary of what the workers of a group did. Times are microseconds, summed over committed steps.

    Attributes:
        steps: How many steps each worker took part in.
        spent: By worker and phase; "outside" is between its steps.
        waited: By worker and what it waited for: another worker, or a text.
        tags: For each exchange, by tag: how often, and how long workers waited in it.
        again: Failed attempts at steps, by worker.
        lost: What workers were doing when they ended: worker, when, step.
        recoveries: When a worker recovered, and how long that took.
    """

    steps: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    spent: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    waited: dict[int, dict[Any, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    tags: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))
    again: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    lost: list[tuple[int, float, int]] = field(default_factory=list)
    recoveries: list[tuple[float, float]] = field(default_factory=list)


def read(events: Iterable[Mapping[str, Any]]) -> dict[int, Timeline]:
    """Summarise the events of a trace, by group.

    Raises:
        KeyError: They are not ours.
    """
    workers: dict[tuple[int, int], tuple[int, int]] = {}
    spans: dict[tuple[int, int], list[_Span]] = defaultdict(list)
    for event in events:
        thread = (event["pid"], event["tid"])
        if event["ph"] == "M" and event["name"] == "thread_name" and "worker" in event["args"]:
            workers[thread] = event["args"].get("group", 0), event["args"]["worker"]
        elif event["ph"] == "X" and event["cat"] != "request":
            begin = event["ts"]
            spans[thread].append(_Span(begin, begin + event["dur"], event["cat"], event["name"], event["args"]))
    found: dict[int, Timeline] = defaultdict(Timeline)
    for thread, theirs in spans.items():
        group, worker = workers[thread]
        _add(found[group], worker, sorted(theirs, key=lambda span: (span.begin, -span.end)))
    return dict(sorted(found.items()))


def requests(events: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], tuple[int, float]]:
    """What servers did: by server and kind of request, how many there were and how long they took in all."""
    servers: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, str], tuple[int, float]] = {}
    for event in events:
        thread = (event["pid"], event["tid"])
        if event["ph"] == "M" and "server" in event["args"]:
            servers[thread] = event["args"]["server"]
        elif event.get("cat") == "request":
            count, took = found.get(key := (servers[thread], event["name"]), (0, 0.0))
            found[key] = count + 1, took + event["dur"]
    return dict(sorted(found.items()))


def has_ended(events: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a trace goes to the end of its run."""
    return any(event.get("cat") == "end" and event["pid"] == 1 for event in events)


def _add(found: Timeline, worker: int, spans: Sequence[_Span]) -> None:
    """Add what one worker did, in order of beginning."""
    open_: list[_Span] = []
    last_end: float | None = None
    for span in spans:
        while open_ and open_[-1].end <= span.begin:
            _close(found, worker, open_)
        if open_:
            open_[-1].inner += span.end - span.begin
        open_.append(span)
        _add_fault(found, worker, span)
        if _is_step(span) and len(open_) == 1:
            found.steps[worker] += 1
            if last_end is not None:
                found.spent[worker]["outside"] += span.begin - last_end
            last_end = span.end
    while open_:
        _close(found, worker, open_)


def _add_fault(found: Timeline, worker: int, span: _Span) -> None:
    """Add a span that tells of a fault, if it does."""
    if span.phase == "unfinished":
        found.lost.append((worker, span.end, span.args["step"]))
    if span.phase == "recovery" and span.args["generation"] > 1:
        found.recoveries.append((span.begin, span.end - span.begin))
    if span.name.endswith(", to be done again"):
        found.again[worker] += 1


def _is_step(span: _Span) -> bool:
    return span.phase == "operation" and span.name == f"step {span.args['step']}"


def _close(found: Timeline, worker: int, open_: list[_Span]) -> None:
    span = open_.pop()
    outer = open_[0] if open_ else span
    if not _is_step(outer) or span.phase not in PHASES:
        return
    own = max(span.end - span.begin - span.inner, 0.0)
    found.spent[worker][span.phase] += own
    exchange = next((each for each in reversed(open_) if each.phase == "exchange"), None)
    if span.phase == "exchange":
        found.tags[span.name][0] += 1
    if span.phase == "wait":
        found.waited[worker][span.args.get("worker", span.name.removeprefix("wait for "))] += own
        if exchange is not None:
            found.tags[exchange.name][1] += own


def render(found: Mapping[int, Timeline], served: Mapping[tuple[int, str], tuple[int, float]]) -> str:
    """The summaries of all groups as tables, in milliseconds per step, and of what servers did for them."""
    if len(found) < 2:
        parts = [_rendered(next(iter(found.values()), Timeline()), "")]
    else:
        parts = [_rendered(each, f"group {group}: ") for group, each in found.items()]
    if served:
        rows = [[f"server {s}, {what}", str(n), f"{took / n / 1e3:.2f}"] for (s, what), (n, took) in served.items()]
        parts.append(["what servers did", *_table(["", "requests", "ms each"], rows)])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _rendered(found: Timeline, of: str) -> list[str]:
    workers = sorted(found.steps)
    if not workers:
        return [f"{of}no step was committed while it was traced", *_faults(found)]
    steps, count = max(found.steps.values()), len(workers)
    lines = [f"{of}{steps} step{'s'[: steps > 1]}, {count} worker{'s'[: count > 1]}; milliseconds of a step"]
    rows = [
        [_NAMES.get(p, p), *(_ms(found, w, found.spent[w].get(p, 0.0)) for w in workers)] for p in (*PHASES, "outside")
    ]
    rows = [row for row in rows if any(cell != "0.00" for cell in row[1:])]
    whole = [
        "a step, all in all",
        *(_ms(found, w, sum(v for p, v in found.spent[w].items() if p != "outside")) for w in workers),
    ]
    lines += ["", *_table(["", *(f"worker {w}" for w in workers)], [*rows, whole])]
    others = {each for w in workers for each in found.waited[w]} - set(workers)
    whom = [*workers, *sorted(others, key=str)]
    if len(whom) > 1:
        rows = [[f"worker {w}", *(_ms(found, w, found.waited[w].get(each, 0.0)) for each in whom)] for w in workers]
        heads = [f"for worker {each}" if isinstance(each, int) else f"for {each}" for each in whom]
        lines += ["", "who waits for whom", *_table(["", *heads], rows)]
    tags = sorted(found.tags.items(), key=lambda item: -item[1][1])[:_MOST_TAGS]
    total = sum(waited for _, waited in found.tags.values())
    rows = [
        [
            tag,
            f"{count / sum(found.steps.values()):.2f}",
            f"{waited / steps / 1e3:.2f}",
            f"{100 * waited / (total or 1):.0f} %",
        ]
        for tag, (count, waited) in tags
    ]
    lines += [
        "",
        "what it is waited for in",
        *_table(["exchange", "a step", "waited, all workers", "of all waits"], rows),
    ]
    return lines + _faults(found)


def _faults(found: Timeline) -> list[str]:
    lines = [f"worker {w} was lost in step {step}, {at / 1e6:.3f} s after the beginning" for w, at, step in found.lost]
    if sum(found.again.values()):
        lines.append(f"{sum(found.again.values())} attempts at steps came to nothing and were done again")
    if found.recoveries:
        slowest = max(lasted for _, lasted in found.recoveries)
        lines.append(f"state was recovered {len(found.recoveries)} times, in {slowest / 1e3:.1f} ms at most")
    return ["", *lines] if lines else []


def _ms(found: Timeline, worker: int, microseconds: float) -> str:
    return f"{microseconds / 1e3 / found.steps[worker]:.2f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in [heads, *rows]) for n in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
