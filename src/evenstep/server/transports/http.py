"""The HTTP transport: Starlette on uvicorn, usable with curl.

Fields are query parameters, tensors are bodies in safetensors; `api.json` describes everything. No decisions are made
here: requests go to the service, in threads, because they may wait.
"""

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from evenstep.core.errors import RefusedError
from evenstep.server.service.metrics import CONTENT_TYPE, prometheus
from evenstep.server.service.requests import from_query
from evenstep.server.service.service import Reply, Service, ServiceCall
from evenstep.server.transports.web import Handler, Json, WebServer, connection_of, guarded, page, token_of
from evenstep.server.wire.tensors import LENGTH_BYTES, TensorHead, head_length

__all__ = ["HttpServer"]

_HERE = Path(__file__).parent
_PIECE_BYTES = 1 << 20
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
        self._service, self._hosts = service, hosts
        self._pool = ThreadPoolExecutor(service.limits.connections, "evenstep-http-request")
        routes = [
            Route("/", self._guarded(self._page, linked=True)),
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
        self._web = WebServer(routes, listener, service.limits, context)

    def close(self) -> None:
        """End all connections, and wait for the threads."""
        self._web.close()
        self._pool.shutdown()

    # ---- requests ----

    async def _page(self, request: Request) -> Response:
        """Serve the page, which holds no figures: it asks for them, with the token that a person enters."""
        if not self._service.guarded:
            connection_of(request).admitted()
        return page(_HERE / "page.html", locked=self._service.guarded)

    async def _api(self, request: Request) -> Response:
        return JSONResponse(json.loads((_HERE / "api.json").read_text()))

    async def _metrics(self, request: Request) -> Response:
        self._service.check_token(token_of(request))
        connection_of(request).admitted()
        return PlainTextResponse(prometheus(await self._do(self._service.status)), media_type=CONTENT_TYPE)

    def _guarded(self, handler: Handler, *, linked: bool = False) -> Handler:
        return guarded(handler, self._hosts, self._service.refused, linked=linked)

    def _admit(self, request: Request, verb: str, body_bytes: int) -> ServiceCall:
        self._service.check_token(token_of(request))  # before the address is even parsed
        fields = from_query(verb, request.query_params.multi_items())
        call = self._service.admit(verb, fields, body_bytes, token_of(request))
        connection_of(request).admitted()
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
        """Run a request in a thread. If nobody waits for it any more, what it holds is released when it is done."""
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
                head = TensorHead.parse(begin[LENGTH_BYTES:head_bytes], call.body_bytes - head_bytes)
                buffer = await self._do(lambda head=head: call.expect(head))  # type: ignore[misc]  # binds it
                piece = bytes(begin[head_bytes:])
            buffer[: len(piece)] = piece
            buffer = buffer[len(piece) :]
        if buffer is None or left:
            raise RefusedError(f"the body ended {left} bytes too early; expected safetensors")


class _Endpoint:
    """A handler as an ASGI application, so that it is called for all methods."""

    def __init__(self, handler: Callable[[Request], Awaitable[Response]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive))
        await response(scope, receive, send)


class _Tensors(Response):
    """Tensors as the body of a response, sent from their own memory."""

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
                # waits until the system has taken everything, so that the memory may change afterwards
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
    return Json(reply.fields, reply.fields["status"])


def _length(request: Request) -> int:
    text = request.headers.get("content-length", "")
    if not text.isdigit():
        raise RefusedError("the request has no Content-Length; send the body in one piece", 411)
    kind = request.headers.get("content-type", "")
    if kind != "application/octet-stream":  # a form of a web page cannot send this
        raise RefusedError(f"Content-Type is '{kind[:100]}', expected application/octet-stream", 415)
    return int(text)
