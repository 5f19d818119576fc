"""A channel through memory that is shared with a server on the same machine."""

import array
import mmap
import os
import socket
from collections.abc import Mapping
from urllib.parse import SplitResult

from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError
from evenstep.server.client.channels import INTELLIGIBLE, Channel, Fields, fields_of
from evenstep.server.wire.areas import Area, hand_over, map_image
from evenstep.server.wire.frames import Frames
from evenstep.server.wire.tensors import DTYPES, LENGTH_BYTES, Spec, TensorHead, encode

__all__ = ["MemoryChannel"]

_MAPPED = 3  # images that a client keeps mapped


class MemoryChannel(Channel):
    """The client's side.

    Args:
        url: The name of the socket.
        token: For the server.
        timeout_s: The connection counts as broken after silence for this long.
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
        self._area: Area | None = None

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
        head = TensorHead.parse(text, num_bytes)
        request = {**fields, "head": text.decode(), "data_bytes": num_bytes}
        if self._area is not None and len(self._area.data) >= num_bytes:
            self._fill(self._area, head, tensors)
            return self._send(verb, request)
        reply = self._send(verb, request)
        if "area_bytes" in reply:  # the server has accepted the head and made room
            self._stream.sendall(b"m")
            fd = _receive_fd(self._stream)
            try:
                self._area = Area(memoryview(mmap.mmap(fd, reply["area_bytes"])))
            finally:
                os.close(fd)
            self._fill(self._area, head, tensors)
            self._stream.sendall(b"d")
            reply = self._next()
        return reply

    def _fill(self, area: Area, head: TensorHead, tensors: Mapping[str, Tensor]) -> None:
        for name, place in area.tensors(head).items():
            hand_over(place, tensors[name])

    def pull(self, fields: Fields, out: Mapping[str, Tensor] | None) -> tuple[Fields, dict[str, Tensor]]:
        """See `Channel`."""
        fields = {key: value for key, value in fields.items() if key != "bfloat16"}  # nothing travels, so keep it exact
        reply = self._send("get", {**fields, "place_only": True, "layout": not self._specs})
        if "image" not in reply:
            return reply, {}
        image = self._image(reply)
        names = reply.pop("names", list(image))
        for name in names:
            if out is not None and (name not in out or Spec.of(out[name]) != self._specs[name]):
                raise ConfigError(f"out['{name}'] is not a tensor like {self._specs[name]}")
        if out is None:
            found = {name: image[name].clone() for name in names}
        else:
            found = {name: hand_over(out[name], image[name]) for name in names}
        self._stream.sendall(b"d")
        return reply, found

    def change(self, deltas: Mapping[str, Tensor]) -> None:
        """Subtract from the parameters themselves, without a lock. Only if the server allows it.

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
        self._images[number] = self._images.pop(number)  # most recently used comes last
        return self._images[number]

    def close(self) -> None:
        """See `Channel`."""
        self._stream.close()
        self._images, self._area = {}, None


def _receive_fd(stream: socket.socket) -> int:
    """Receive a descriptor. The server sends it only on request, so that reading ahead does not lose it."""
    data, ancillary, _, _ = stream.recvmsg(1, socket.CMSG_SPACE(4))
    for level, kind, value in ancillary:
        if data and level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return array.array("i", value[:4])[0]
    raise ConnectionResetError("the server sent no memory")
