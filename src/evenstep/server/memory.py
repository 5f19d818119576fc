"""The shared-memory transport, for clients on the server's machine that run as the same user.

Requests go through a Unix socket (an abstract one, so no file is left behind) as frames like those over TCP; tensors do
not. A client reads parameters where they are: the reply to `get` names an image, which the client maps once and copies
from while the server holds it. An update lies in an *area* that the server makes for the connection. Both are sealed:
a client cannot shorten what the server has mapped.

With `lock=False` a client may write to the image, and subtracts its deltas there without asking anyone.
"""

import array
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Mapping
from urllib.parse import SplitResult

from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError
from evenstep.server.channels import INTELLIGIBLE, Channel, Fields, fields_of
from evenstep.server.connections import Connections, Conversation, Placed
from evenstep.server.frames import Frames
from evenstep.server.images import hand_over, map_image
from evenstep.server.rooms import Room
from evenstep.server.service import Call, Reply, Service
from evenstep.server.wire import DTYPES, LENGTH_BYTES, Head, Spec, encode

__all__ = ["MemoryChannel", "MemoryServer"]

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_MAPPED = 3  # images that a client keeps mapped


def _send_fd(stream: socket.socket, fd: int) -> None:
    stream.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def _receive_fd(stream: socket.socket) -> int:
    """A descriptor. The other side sends it only when it is asked to, so that nobody has read ahead."""
    data, ancillary, _, _ = stream.recvmsg(1, socket.CMSG_SPACE(4))
    for level, kind, value in ancillary:
        if data and level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return array.array("i", value[:4])[0]
    raise ConnectionResetError("the server sent no memory")


class MemoryServer(Connections):
    """The server's side.

    Args:
        service: What to serve.
        name: Of the abstract socket.
    """

    def __init__(self, service: Service, name: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")
        listener.listen(128)
        super().__init__(service, listener, "memory", conversation=_MemoryConversation)


class _MemoryConversation(Conversation):
    def __init__(self, service: Service, stream: socket.socket) -> None:
        super().__init__(service, stream)
        self._stream = stream
        self._area: Room | None = None

    def run(self) -> None:
        uid = _CREDENTIALS.unpack(self._stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if uid in (os.getuid(), 0):
            super().run()

    def receive(self, call: Call, placed: Placed | None) -> None:
        if placed is None:
            super().receive(call, placed)
            return
        if not call.takes_tensors:
            raise RefusedError(f"'{call.verb}' takes no tensors")
        num_bytes, most = placed.data_bytes, self.service.limits.body_bytes
        if num_bytes > most:
            raise RefusedError(f"{num_bytes} bytes of tensors, expected at most {most}", 413)
        head = Head.parse(placed.head.encode(), num_bytes)
        call.check(head)
        if self._area is None or len(self._area.data) < max(num_bytes, 1):
            self._area = Room(memoryview(self._make_area(max(num_bytes, 1))))
            self._await_done()
        call.place(head, self._area)

    def _make_area(self, num_bytes: int) -> mmap.mmap:
        fd = os.memfd_create("evenstep-area", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self.frames.send({"status": 101, "area_bytes": num_bytes})
            self._await_done()
            _send_fd(self._stream, fd)
            return mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)

    def reply(self, reply: Reply) -> None:
        self.frames.send(reply.fields, reply.parts)
        if reply.image is None:
            return
        if self._await_done() == b"m":  # it does not know this image yet
            writable = not self.service.store.options.lock
            fd = os.open(f"/proc/self/fd/{reply.image.fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
            try:
                _send_fd(self._stream, fd)
            finally:
                os.close(fd)
            self._await_done()

    def close(self) -> None:
        self._area = None

    def _await_done(self) -> bytes:
        return self.frames.take(1)


class MemoryChannel(Channel):
    """The client's side.

    Args:
        url: The name of the socket.
        token: For the server.
        timeout_s: Longer silence than that means the connection is broken.
    """

    def __init__(self, url: SplitResult, token: str | None, timeout_s: float) -> None:
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stream.settimeout(timeout_s)
        try:
            self._stream.connect(f"\0{url.netloc}")
        except OSError:
            self._stream.close()
            raise
        self._frames = Frames(self._stream, timeout_s)
        self._token, self._timeout_s = token, timeout_s
        self._images: dict[int, dict[str, Tensor]] = {}
        self._specs: dict[str, Spec] = {}
        self._area: Room | None = None

    def _send(self, verb: str, fields: Fields) -> Fields:
        request = {"verb": verb, **fields}
        if self._token is not None:
            request["token"] = self._token
        self._frames.within(self._timeout_s)
        self._frames.send(request)
        return self._next()

    def _next(self) -> Fields:
        with INTELLIGIBLE:
            begun = self._frames.begin()
        if begun is None:
            raise ConnectionResetError("the server closed the connection")
        return fields_of(begun[0])

    def ask(self, verb: str, fields: Fields) -> Fields:
        """See `Channel`."""
        return self._send(verb, fields)

    def push(self, verb: str, fields: Fields, tensors: Mapping[str, Tensor]) -> Fields:
        """See `Channel`."""
        parts = encode(tensors)
        text = bytes(parts[0][LENGTH_BYTES:])
        num_bytes = sum(len(part) for part in parts[1:])
        head = Head.parse(text, num_bytes)
        request = {**fields, "head": text.decode(), "data_bytes": num_bytes}
        if self._area is not None and len(self._area.data) >= num_bytes:
            self._fill(self._area, head, tensors)
            return self._send(verb, request)
        reply = self._send(verb, request)
        if "area_bytes" in reply:  # the server has looked at the head, and has made room
            self._stream.sendall(b"m")
            fd = _receive_fd(self._stream)
            try:
                self._area = Room(memoryview(mmap.mmap(fd, reply["area_bytes"])))
            finally:
                os.close(fd)
            self._fill(self._area, head, tensors)
            self._stream.sendall(b"d")
            reply = self._next()
        return reply

    def _fill(self, area: Room, head: Head, tensors: Mapping[str, Tensor]) -> None:
        for name, place in area.tensors(head).items():
            hand_over(place, tensors[name])

    def pull(self, fields: Fields, out: Mapping[str, Tensor] | None) -> tuple[Fields, dict[str, Tensor]]:
        """See `Channel`."""
        fields = {key: value for key, value in fields.items() if key != "bfloat16"}  # nothing travels: keep it exact
        reply = self._send("get", {**fields, "place_only": True, "layout": not self._specs})
        if "image" not in reply:
            return reply, {}
        image = self._image(reply)
        names = reply.pop("names", list(image))
        for name in names:
            if out is not None and (name not in out or Spec.of(out[name]) != self._specs[name]):
                raise ConfigError(f"out['{name}'] is no tensor like {self._specs[name]}")
        if out is None:
            found = {name: image[name].clone() for name in names}
        else:
            found = {name: hand_over(out[name], image[name]) for name in names}
        self._stream.sendall(b"d")
        return reply, found

    def change(self, deltas: Mapping[str, Tensor]) -> None:
        """Subtract from the parameters themselves, without a lock. Only where the server allows it.

        Raises:
            RefusedError: A delta has another shape or dtype than its parameter.
        """
        if not self._images:
            self.pull({}, None)
        (image,) = self._images.values()
        for name, delta in deltas.items():
            if name not in self._specs or Spec.of(delta) != self._specs[name]:
                raise RefusedError(f"'{name}' came as {Spec.of(delta)}, expected {self._specs.get(name)}")
        for name, delta in deltas.items():
            image[name].sub_(delta)

    def _image(self, reply: Fields) -> dict[str, Tensor]:
        for name, (dtype, shape) in reply.pop("layout", {}).items():
            self._specs[name] = Spec(DTYPES[dtype], tuple(shape))
        number = reply.pop("image")
        if number not in self._images:
            self._stream.sendall(b"m")
            fd = _receive_fd(self._stream)
            try:
                self._images[number] = map_image(fd, self._specs, writable=bool(reply.get("writable")))
            finally:
                os.close(fd)
            while len(self._images) > _MAPPED:
                del self._images[next(iter(self._images))]
        self._images[number] = self._images.pop(number)  # the last used is the last
        return self._images[number]

    def close(self) -> None:
        """See `Channel`."""
        self._stream.close()
        self._images, self._area = {}, None
