"""Our web server: Starlette on uvicorn, behind a door that keeps out strangers and pages from elsewhere."""

import asyncio
import base64
import contextlib
import hashlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute

from evenstep.core.errors import ConfigError, RefusedError, ServerError
from evenstep.server.service.limits import Limits
from evenstep.server.transports.http_connection import HttpConnection, Reception
from evenstep.server.wire.text import write_json

__all__ = ["Handler", "Json", "WebServer", "connection_of", "guarded", "page", "token_of"]

Handler = Callable[[Request], Awaitable[Response]]

_HERE = Path(__file__).parent
_PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
log = logging.getLogger("evenstep.server")


class _Uvicorn(uvicorn.Server):
    """Stops at once when asked to: uvicorn looks ten times a second, and then pauses even if nobody is connected."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._asked = asyncio.Event()

    def stop(self) -> None:
        """Make it stop; call this in its loop."""
        self.should_exit = True
        self._asked.set()

    async def main_loop(self) -> None:
        """See uvicorn: run its regular work once a second until it is asked to stop."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn: let replies that have begun be finished, for a limited time."""
        state, loop = self.server_state, asyncio.get_running_loop()
        for connection in list(state.connections):
            connection.shutdown()
        deadline = loop.time() + (self.config.timeout_graceful_shutdown or 0)
        await asyncio.sleep(0)  # idle connections end now
        while (state.connections or state.tasks) and loop.time() < deadline:
            await asyncio.sleep(0.005)
        if state.tasks:
            log.warning("the server stops before %d requests are answered, which took too long", len(state.tasks))
        for task in list(state.tasks):
            task.cancel()


class WebServer:
    """Serves routes in its own thread until it is closed.

    Args:
        routes: The routes; handlers should be `guarded`.
        listener: A bound socket; taken over.
        limits: How many connections there may be, and how long one may be a stranger.
        context: For TLS, if wanted.

    Raises:
        ConfigError: It cannot be started.
    """

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        listener: socket.socket,
        limits: Limits,
        context: ssl.SSLContext | None = None,
    ) -> None:
        config = uvicorn.Config(
            Starlette(routes=routes),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=600,
            timeout_graceful_shutdown=2,
        )
        self._listener, self._server = listener, _Uvicorn(config)
        self._reception = Reception(self._server, listener, limits, context)
        self._stop: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._serve, name="evenstep-http", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ConfigError("the HTTP server could not be started within 30 s")
            time.sleep(0.001)

    def _serve(self) -> None:
        asyncio.run(self._run_until_closed())

    async def _run_until_closed(self) -> None:
        accepting = asyncio.create_task(self._reception.run())
        loop = asyncio.get_running_loop()

        def stop() -> None:
            accepting.cancel()
            self._server.stop()

        self._stop = lambda: loop.call_soon_threadsafe(stop)
        await self._server.serve(sockets=[])
        await asyncio.wait([accepting])
        await self._reception.end()

    def close(self) -> None:
        """End all connections, and wait for the thread."""
        self._stop()
        self._thread.join()
        self._listener.close()


class Json(Response):
    """Fields as a response; unlike Starlette's, with any characters in them."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """See Starlette."""
        return write_json(content)


def guarded(
    handler: Handler,
    hosts: frozenset[str] | None,
    refused: Callable[[RefusedError], dict[str, Any]],
    *,
    linked: bool = False,
) -> Handler:
    """Admit only requests that a browser should allow, and translate our errors.

    Args:
        handler: The handler.
        hosts: The names by which the server may be called, or None for any: on loopback this keeps out web pages that
            point a name of their own at it.
        refused: Turns a refusal into fields.
        linked: Whether it may be reached by a link from elsewhere.
    """

    async def answer(request: Request) -> Response:
        try:
            _check_host(request, hosts)
            _check_site(request, linked)
            return await handler(request)
        except RefusedError as error:
            closing = {"connection": "close"} if error.status in (401, 403, 411) else None
            return Json(refused(error), error.status, closing)
        except ServerError as error:
            return Json({"status": 500, "error": str(error)}, 500)
        except Exception as error:
            log.exception("a request failed")
            return Json({"status": 500, "error": f"the server failed: {error!r}; its log says where"}, 500)

    return answer


def page(path: Path, *, locked: bool) -> Response:
    """A page that may run only its own script and styles, and talk only to its server.

    Args:
        path: Where it is.
        locked: Whether it must ask for a token before it shows anything.
    """
    text = path.read_text()
    for mark in ("<!-- page_head.html -->\n", "/* page.css */\n", "/* page.js */\n"):  # what all pages share
        text = text.replace(mark, (_HERE / mark.split()[1]).read_text(), 1)
    if locked:
        text = text.replace('<html lang="en">', '<html lang="en" data-guarded="yes">', 1)
    return HTMLResponse(text, headers={"Content-Security-Policy": _policy(text), **_PAGE_HEADERS})


def connection_of(request: Request) -> HttpConnection:
    """The connection that a request came by."""
    found: HttpConnection = request.state.connection
    return found


def token_of(request: Request) -> str | None:
    """The token that a request carries, if any."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else None


def _check_host(request: Request, expected: frozenset[str] | None) -> None:
    hosts = request.headers.getlist("host")
    if len(hosts) > 1:
        raise RefusedError(f"the request has {len(hosts)} Host headers, expected one")
    host = "".join(hosts).rsplit(":", 1)[0].strip("[]").lower()
    if expected is not None and host not in expected:
        raise RefusedError(f"this server is called {sorted(expected)[0]}, not '{host[:100]}'", 403)


def _check_site(request: Request, linked: bool) -> None:
    """Refuse what a browser sends for a page of another site, with or without an Origin."""
    headers = request.headers
    elsewhere = any(origin.partition("://")[2] != headers.get("host") for origin in headers.getlist("origin"))
    by_link = linked and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if not by_link and any(site not in ("same-origin", "none") for site in headers.getlist("sec-fetch-site")):
        elsewhere = True
    if elsewhere:
        raise RefusedError("a page from elsewhere may not talk to this server", 403)


def _policy(text: str) -> str:
    allowed = {"connect-src": "'self'", "img-src": "data:"}
    for kind in ("style", "script"):
        inner = text.partition(f"<{kind}>")[2].partition(f"</{kind}>")[0]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        allowed[f"{kind}-src"] = f"'sha256-{digest}'"
    nothing = "".join(f"; {what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors"))
    return "default-src 'none'; " + "; ".join(f"{key} {value}" for key, value in allowed.items()) + nothing
