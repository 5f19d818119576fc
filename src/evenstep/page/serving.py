"""Serves the page of a run: reads the run's segment, and asks its supervisor.

It reads only while someone looks at the page. The run does not need it, and goes on if it ends.
"""

import asyncio
import hmac
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from evenstep.core.control import ask
from evenstep.core.errors import ConfigError, RefusedError
from evenstep.page.history import History
from evenstep.server.service.limits import Limits
from evenstep.server.service.metrics import CONTENT_TYPE, exposition
from evenstep.server.transports.web import Handler, Json, WebServer, connection_of, guarded, page, token_of
from evenstep.transport.segment import Segment

__all__ = ["serve"]

_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
_LIMITS = Limits(connections=64)
_IDLE_S = 10.0  # after the last request, until the page counts as closed
_LOOK_S = 1.0
_HERE = Path(__file__).parent


def serve(segment: Segment, supervisor: int, listener: socket.socket, token: str, over: int) -> int:
    """Serve the page of a run; returns an exit code. Blocks.

    While nobody looks, it only waits for a connection.

    Args:
        segment: The segment of the run.
        supervisor: The process id of what answers for the run.
        listener: Where it listens.
        token: The secret that buttons need.
        over: A descriptor that becomes readable when the run is over.
    """
    source = _Source(segment, supervisor)
    while over not in select.select([over, listener.fileno()], [], [])[0]:
        server = WebServer(_Handlers(source, token).routes(), listener.dup(), _LIMITS)
        source.asked_s = time.monotonic()
        try:
            while time.monotonic() - source.asked_s < _IDLE_S:
                if select.select([over], [], [], _LOOK_S)[0]:
                    return 0
        finally:
            server.close()
    return 0


class _Source:
    """What there is to see of a run.

    Attributes:
        asked_s: The time of the last request, by the monotonic clock.
    """

    def __init__(self, segment: Segment, supervisor: int) -> None:
        self._history, self._supervisor = History(segment), supervisor
        self._lock = threading.Lock()  # several requests may look at once
        self.asked_s = 0.0

    def status(self) -> dict[str, Any]:
        """Everything."""
        found = ask({"status": True}, self._supervisor)
        with self._lock:
            self._history.look()
            last = self._history.last
            found |= {
                "step": last.step if last is not None else 0,
                "loss": last.loss if last is not None else None,
                "samples": self._history.samples,
                "samples_per_s": self._history.samples_per_s,
                "curves": self._history.curves(),
            }
        plain: dict[str, Any] = _plain(found)
        return plain

    def press(self, button: str) -> dict[str, Any]:
        """Do what a button says."""
        wanted = ask({"status": True}, self._supervisor)["wanted"]
        request: dict[str, Any] = {"scale": wanted + (1 if button == "add" else -1)}
        return ask(request if button in ("add", "remove") else {button: True}, self._supervisor)


class _Handlers:
    """Answers the requests to the page."""

    def __init__(self, source: _Source, token: str) -> None:
        self._source, self._token = source, token

    def routes(self) -> list[Route]:
        """Which request goes where."""
        return [
            Route("/", self._let_in(self._page, linked=True)),
            Route("/status", self._let_in(self._status)),
            Route("/metrics", self._let_in(self._metrics)),
            Route("/press/{button}", self._let_in(self._press), methods=["POST"]),
        ]

    def _let_in(self, handler: Handler, *, linked: bool = False) -> Handler:
        async def admitted(request: Request) -> Response:
            connection_of(request).admitted()
            self._source.asked_s = time.monotonic()
            return await handler(request)

        return guarded(admitted, _HOSTS, _refused, linked=linked)

    async def _page(self, _: Request) -> Response:
        return page(_HERE / "page.html", locked=False)

    async def _status(self, _: Request) -> Response:
        return Json(await _do(self._source.status))

    async def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(_prometheus(await _do(self._source.status)), media_type=CONTENT_TYPE)

    async def _press(self, request: Request) -> Response:
        if not hmac.compare_digest((token_of(request) or "").encode(), self._token.encode()):
            raise RefusedError("buttons need the token that the run printed at its start", 401)
        button = request.path_params["button"]
        if button not in ("add", "remove", "checkpoint", "stop", "fingerprint"):
            raise RefusedError(f"there is no button {button[:40]!r}", 404)
        return Json(await _do(lambda: self._source.press(button)))


def _refused(error: RefusedError) -> dict[str, Any]:
    return {"status": error.status, "error": str(error)}


async def _do(look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Look in a thread: the supervisor may take a moment to answer.

    Raises:
        RefusedError: It has no answer, or refuses.
    """
    try:
        return await asyncio.to_thread(look)
    except ConfigError as error:
        raise RefusedError(str(error), 409) from error


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite, which no curve can show, become None."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
    return value


def _prometheus(status: dict[str, Any]) -> str:
    workers = status["workers"]
    curves = {name: points[-1][1] for name, points in status["curves"].items() if points[-1][1] is not None}
    phases = ("compute", "wait", "update", "exchange")
    return exposition(
        "evenstep_run",
        [
            ("steps_total", "counter", "Committed steps.", [({}, status["step"])]),
            ("samples_total", "counter", "Samples of all steps.", [({}, status["samples"])]),
            ("workers", "gauge", "Workers.", [({}, len(workers))]),
            ("restarts_total", "counter", "Workers that were replaced.", [({}, status["restarts"])]),
            ("value", "gauge", "Loss, metrics and what is logged.", [({"name": n}, v) for n, v in curves.items()]),
            (
                "worker_seconds_total",
                "counter",
                "Where the time of a worker went.",
                [({"worker": str(w["worker"]), "in": each}, w[f"{each}_s"]) for w in workers for each in phases],
            ),
        ],
    )
