"""What a server of a run with groups did when, as events of the trace.

A server is a *process* of the trace, and each of its connections a *thread*: one request after another.
"""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from evenstep.launch.trace_lines import name_of

__all__ = ["ServerTrace"]

_MOST = 100_000  # requests between two flushes: a few seconds of them


class ServerTrace:
    """Notes requests as they end; see `Service.watch`.

    Args:
        number: The number of the server.
        process: Its process in the trace.
        began_ns: The zero of the trace, by this machine's monotonic clock.
        write: Takes events.
    """

    def __init__(self, number: int, process: int, began_ns: int, write: Callable[[Sequence[str]], None]) -> None:
        self._number, self._process, self._zero = number, process, began_ns / 1e3
        self._write, self._lock = write, threading.Lock()
        self._requests: list[tuple[int, str, str, float, float]] = []
        self._clients: dict[int, str] = {}  # the client that spoke last in each thread
        self._lanes: dict[tuple[int, str], int] = {}  # the threads of the trace, by thread and client
        self._lost = 0
        write([name_of("process_name", process, 0, f"server {number}")])

    def note(self, verb: str, client: str, begin_s: float, end_s: float) -> None:
        """A request is over; called in the thread of its connection."""
        with self._lock:
            if len(self._requests) < _MOST:
                self._requests.append((threading.get_ident(), verb, client, begin_s, end_s))
            else:
                self._lost += 1

    def flush(self) -> None:
        """Write what was noted since the last call."""
        with self._lock:
            requests, self._requests, lost, self._lost = self._requests, [], self._lost, 0
        lines: list[str] = []
        for thread, verb, client, begin_s, end_s in requests:
            client = self._clients[thread] = client or self._clients.get(thread, "")
            if (thread, client) not in self._lanes:
                self._lanes[thread, client] = lane = len(self._lanes) + 1
                name = client or "other requests"
                lines.append(name_of("thread_name", self._process, lane, name, server=self._number))
            event = self._event("X", self._lanes[thread, client], begin_s, verb)
            lines.append(json.dumps({**event, "dur": round(1e6 * (end_s - begin_s), 3), "cat": "request"}))
        if lost:
            text = f"{lost} requests are missing here: there was no room"
            lines.append(json.dumps({**self._event("i", 1, requests[-1][4], text), "s": "p", "cat": "lost"}))
        if lines:
            self._write(lines)

    def _event(self, kind: str, lane: int, when_s: float, name: str) -> dict[str, Any]:
        when = round(1e6 * when_s - self._zero, 3)
        return {"ph": kind, "pid": self._process, "tid": lane, "ts": when, "name": name, "args": {}}
