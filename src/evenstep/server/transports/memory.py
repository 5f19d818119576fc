"""The shared-memory transport, for clients on the server's machine that run as the same user.

Requests go through a Unix socket (an abstract one, so no file is left behind) as frames like those over TCP; tensors do
not. A client reads parameters in place: the reply to `get` names an image, which the client maps once and copies
from while the server holds it. An update goes into an *area* that the server makes for the connection. Both are sealed:
a client cannot shorten what the server has mapped.

With `lock=False` a client may write to the image, and subtracts its deltas there without asking anyone.
"""

import array
import fcntl
import mmap
import os
import socket
import struct

from evenstep.core.errors import RefusedError
from evenstep.server.service.service import Reply, Service, ServiceCall
from evenstep.server.transports.sockets import Connections, Conversation, SharedTensors
from evenstep.server.wire.areas import Area
from evenstep.server.wire.tensors import TensorHead

__all__ = ["MemoryServer"]

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def _send_fd(stream: socket.socket, fd: int) -> None:
    stream.sendmsg([b"F"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


class MemoryServer(Connections):
    """The server's side.

    Args:
        service: What to serve.
        name: The name of the abstract socket.
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
        self._area: Area | None = None

    def run(self) -> None:
        uid = _CREDENTIALS.unpack(self._stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if uid in (os.getuid(), 0):
            super().run()

    def receive(self, call: ServiceCall, placed: SharedTensors | None) -> None:
        if placed is None:
            super().receive(call, placed)
            return
        if not call.takes_tensors:
            raise RefusedError(f"'{call.verb}' takes no tensors")
        num_bytes, most = placed.data_bytes, self.service.limits.body_bytes
        if num_bytes > most:
            raise RefusedError(f"{num_bytes} bytes of tensors, expected at most {most}", 413)
        head = TensorHead.parse(placed.head.encode(), num_bytes)
        call.check(head)
        if self._area is None or len(self._area.data) < max(num_bytes, 1):
            self._area = Area(memoryview(self._make_area(max(num_bytes, 1))))
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
        if self._await_done() == b"m":  # the client has not mapped this image yet
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
