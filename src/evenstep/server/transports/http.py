"""The HTTP transport: Starlette on uvicorn, usable with curl.

Fields are query parameters, tensors are bodies in safetensors; `api.json` describes it all. Nothing here decides
anything: requests go to the service, in threads, because they may wait.
"""

import asyncio
import base64
import hashlib
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from evenstep.core.errors import ConfigError, RefusedError, ServerError
from evenstep.server.service.metrics import CONTENT_TYPE, prometheus
from evenstep.server.service.requests import from_query
from evenstep.server.service.service import Reply, Service, ServiceCall
from evenstep.server.transports.http_connection import HttpConnection, Reception
from evenstep.server.wire.tensors import LENGTH_BYTES, Head, head_length
from evenstep.server.wire.text import write_json

__all__ = ["HttpServer"]

_HERE = Path(__file__).parent
_PIECE_BYTES = 1 << 20
_PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
log = logging.getLogger("evenstep.server")


class HttpServer:
    """The transport's server side.

    Args:
        service: What to serve.
        listener: A bound socket; taken over.
        context: For TLS, if wanted.
        hosts: The names by which the server may be called, or None for any: on loopback this keeps out web pages that
            point a name of their own at it.

    Raises:
        ConfigError: It cannot be started.
    """

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        context: ssl.SSLContext | None = None,
        hosts: frozenset[str] | None = None,
    ) -> None:
        self._service, self._listener, self._hosts = service, listener, hosts
        self._pool = ThreadPoolExecutor(service.limits.connections, "evenstep-http-request")
        app = Starlette(
            routes=[
                Route("/", self._guarded(self._page, page=True)),
                Route("/parameters", self._tensors("get", "put"), methods=["GET", "PUT"]),
                Route("/update", self._tensors("", "update"), methods=["POST"]),
                Route("/register", self._plain("register"), methods=["POST"]),
                Route("/leave", self._plain("leave"), methods=["POST"]),
                Route("/wait", self._plain("wait")),
                Route("/status", self._plain("status")),
                Route("/slice", self._plain("slice")),
                Route("/stage", self._tensors("", "stage"), methods=["POST"]),
                Route("/order", self._plain("order"), methods=["POST"]),
                Route("/pause", self._plain("pause"), methods=["POST"]),
                Route("/metrics", self._guarded(self._metrics)),
                Route("/openapi.json", self._guarded(self._api)),
            ]
        )
        config = uvicorn.Config(
            app,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=600,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._reception = Reception(self._server, listener, service.limits, context)
        self._accept_no_more: Callable[[], object] = lambda: None
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
        self._accept_no_more = lambda: loop.call_soon_threadsafe(accepting.cancel)
        await self._server.serve(sockets=[])
        await asyncio.wait([accepting])
        await self._reception.end()

    def close(self) -> None:
        """End all connections, and wait for the threads."""
        self._accept_no_more()
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()
        self._pool.shutdown()

    # ---- requests ----

    async def _page(self, request: Request) -> Response:
        """The page holds no figures: it asks for them, with the token that a person gives it."""
        text = (_HERE / "page.html").read_text()
        if self._service.guarded:
            text = text.replace('<html lang="en">', '<html lang="en" data-guarded="yes">', 1)
        else:
            _connection(request).admitted()
        return HTMLResponse(text, headers={"Content-Security-Policy": _policy(text), **_PAGE_HEADERS})

    async def _api(self, request: Request) -> Response:
        return JSONResponse(json.loads((_HERE / "api.json").read_text()))

    async def _metrics(self, request: Request) -> Response:
        self._service.check_token(_token(request))
        _connection(request).admitted()
        return PlainTextResponse(prometheus(await self._do(self._service.status)), media_type=CONTENT_TYPE)

    def _guarded(
        self, handler: Callable[[Request], Awaitable[Response]], *, page: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """Let in only whom a browser should let in, and translate our errors.

        Args:
            handler: What answers.
            page: Whether a person may come to it by a link from elsewhere.
        """

        async def guarded(request: Request) -> Response:
            try:
                self._check_host(request)
                _check_site(request, page)
                return await handler(request)
            except RefusedError as error:
                closing = {"connection": "close"} if error.status in (401, 403, 411) else None
                return _Json(self._service.refused(error), error.status, closing)
            except ServerError as error:
                return _Json({"status": 500, "error": str(error)}, 500)
            except Exception as error:
                log.exception("a request failed")
                return _Json({"status": 500, "error": f"the server failed: {error!r}; its log says where"}, 500)

        return guarded

    def _admit(self, request: Request, verb: str, body_bytes: int) -> ServiceCall:
        self._service.check_token(_token(request))  # before the address is even parsed
        fields = from_query(verb, request.query_params.multi_items())
        call = self._service.admit(verb, fields, body_bytes, _token(request))
        _connection(request).admitted()
        return call

    def _plain(self, verb: str) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            call = self._admit(request, verb, 0)
            reply = None
            try:
                reply = await self._run(call)
                return _json(reply)
            finally:
                call.close(reply)

        return self._guarded(handler)

    def _tensors(self, pull: str, push: str) -> Any:
        """An endpoint whose requests or replies carry tensors."""

        async def handler(request: Request) -> Response:
            pulls = request.method in ("GET", "HEAD")
            call = self._admit(request, pull if pulls else push, 0 if pulls else _length(request))
            reply = None
            try:
                if call.body_bytes:
                    await self._receive(request, call)
                reply = await self._run(call)
            except BaseException:
                call.close(None)
                raise
            return _json(reply, call) if not reply.parts else _Tensors(reply, call, self._service)

        return _Endpoint(self._guarded(handler))

    async def _do(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def _run(self, call: ServiceCall) -> Reply:
        """Do a request in a thread. If nobody waits for it any more, what it holds is let go when it is done."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, call.run)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_let_go)
            raise

    async def _receive(self, request: Request, call: ServiceCall) -> None:
        """Read a body: its head, then the data into the memory that the call gives."""
        try:
            async with asyncio.timeout(self._service.limits.transfer_s(call.body_bytes)):
                await self._read(request, call)
        except TimeoutError:
            raise RefusedError("the body came too slowly", 408) from None
        except ClientDisconnect:
            raise RefusedError("the body ended too early") from None

    async def _read(self, request: Request, call: ServiceCall) -> None:
        begin = bytearray()
        buffer: memoryview | None = None
        left = call.body_bytes
        async for piece in request.stream():
            left -= len(piece)
            if left < 0:
                raise RefusedError("the body is longer than its Content-Length")
            if buffer is None:
                begin += piece
                head_bytes = LENGTH_BYTES
                if len(begin) >= LENGTH_BYTES:
                    head_bytes += head_length(begin[:LENGTH_BYTES], call.body_bytes)
                if len(begin) < head_bytes:
                    continue
                head = Head.parse(begin[LENGTH_BYTES:head_bytes], call.body_bytes - head_bytes)
                buffer = await self._do(lambda head=head: call.expect(head))  # type: ignore[misc]  # binds it
                piece = bytes(begin[head_bytes:])
            buffer[: len(piece)] = piece
            buffer = buffer[len(piece) :]
        if buffer is None or left:
            raise RefusedError(f"the body ended {left} bytes too early; expected safetensors")

    def _check_host(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        if len(hosts) > 1:
            raise RefusedError(f"the request has {len(hosts)} Host headers, expected one")
        host = "".join(hosts).rsplit(":", 1)[0].strip("[]").lower()
        if self._hosts is not None and host not in self._hosts:
            raise RefusedError(f"this server is called {sorted(self._hosts)[0]}, not '{host[:100]}'", 403)


def _check_site(request: Request, page: bool) -> None:
    """Refuse what a browser sends for a page of another site, with an Origin or without."""
    headers = request.headers
    elsewhere = any(origin.partition("://")[2] != headers.get("host") for origin in headers.getlist("origin"))
    by_link = page and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if not by_link and any(site not in ("same-origin", "none") for site in headers.getlist("sec-fetch-site")):
        elsewhere = True
    if elsewhere:
        raise RefusedError("a page from elsewhere may not talk to this server", 403)


def _policy(page: str) -> str:
    """What a browser may do for the page: run its script and styles and no others, and talk to this server only."""
    allowed = {"connect-src": "'self'", "img-src": "data:"}
    for kind in ("style", "script"):
        text = page.partition(f"<{kind}>")[2].partition(f"</{kind}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[f"{kind}-src"] = f"'sha256-{digest}'"
    nothing = "".join(f"; {what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors"))
    return "default-src 'none'; " + "; ".join(f"{key} {value}" for key, value in allowed.items()) + nothing


class _Json(Response):
    """Fields as a response; unlike Starlette's, with any characters in them."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return write_json(content)


class _Endpoint:
    """A handler as an ASGI application, so that it is called for all methods."""

    def __init__(self, handler: Callable[[Request], Awaitable[Response]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive))
        await response(scope, receive, send)


class _Tensors(Response):
    """Tensors as the body of a response, out of the memory where they are."""

    def __init__(self, reply: Reply, call: ServiceCall, service: Service) -> None:
        super().__init__(media_type="application/octet-stream")
        self._reply, self._call, self._service = reply, call, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = {key: value for key, value in self._reply.fields.items() if key != "status"}
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(self._reply.num_bytes).encode()),
            (b"x-evenstep-version", str(fields.get("version")).encode()),
            (b"x-evenstep-fields", json.dumps(fields).encode()),
        ]
        try:
            async with asyncio.timeout(self._service.limits.transfer_s(self._reply.num_bytes)):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                for part in self._reply.parts if scope["method"] != "HEAD" else []:
                    for start in range(0, len(part), _PIECE_BYTES):
                        body = part[start : start + _PIECE_BYTES]
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                # this waits until the system has taken all of it, so that the memory may change afterwards
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            log.info("a client read too slowly and was dropped")
            raise
        finally:
            self._call.close(self._reply)


def _let_go(future: asyncio.Future[Reply]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()


def _json(reply: Reply, call: ServiceCall | None = None) -> Response:
    if call is not None:
        call.close(reply)
    return _Json(reply.fields, reply.fields["status"])


def _connection(request: Request) -> HttpConnection:
    found: HttpConnection = request.state.connection
    return found


def _token(request: Request) -> str | None:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token if kind.lower() == "bearer" else None


def _length(request: Request) -> int:
    text = request.headers.get("content-length", "")
    if not text.isdigit():
        raise RefusedError("the request has no Content-Length; send the body in one piece", 411)
    kind = request.headers.get("content-type", "")
    if kind != "application/octet-stream":  # a form of a web page cannot send this
        raise RefusedError(f"Content-Type is '{kind[:100]}', expected application/octet-stream", 415)
    return int(text)
