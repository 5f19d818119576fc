"""Words between machines as messages: what workers have posted, that one has failed, or only a sign of life.

The first message of each has the same size, so that it can be expected before it is known what will come; only what
does not fit into it needs a second one. Both end in room for a checksum (see `links`).
"""

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.native import core
from evenstep.transport.links import SEAL_BYTES

__all__ = ["FIRST_BYTES", "beat", "empty", "failure", "failure_in", "posts", "rest_of", "take_posts"]

FIRST_BYTES = 4096
_HEAD = struct.Struct("<QQ")  # bytes in all, number of posts (posts.h)
_FAILURE_BYTES = 3500  # how much of the end of a failure's text is sent, so that it is one message
_CULPRIT_BYTES = 8


def empty(num_bytes: int = FIRST_BYTES) -> Tensor:
    """Room for a message, or for what is left of one."""
    return torch.zeros(-(-num_bytes // 8) * 8 + SEAL_BYTES, dtype=torch.uint8)


def posts(base: int, seq: int, workers: Sequence[int]) -> list[Tensor]:
    """What workers of this machine have posted, as one or two messages.

    Args:
        base: The segment of this machine.
        seq: The number of the exchange.
        workers: Which workers.
    """
    first, among = empty(), tuple(workers)
    num_bytes = core.pack_posts(base, seq, among, first.data_ptr(), FIRST_BYTES)
    assert num_bytes, "a slot is kept until it has been sent"
    if num_bytes <= FIRST_BYTES:
        return [first]
    whole, rest = empty(num_bytes), empty(num_bytes - FIRST_BYTES)
    core.pack_posts(base, seq, among, whole.data_ptr(), num_bytes)
    first[:FIRST_BYTES] = whole[:FIRST_BYTES]
    rest[: num_bytes - FIRST_BYTES] = whole[FIRST_BYTES:num_bytes]
    return [first, rest]


def failure(culprit: int, text: str) -> Tensor:
    """The message that a worker has failed, with the end of the reason."""
    note = text.encode(errors="backslashreplace")[-_FAILURE_BYTES:]
    return _message(culprit.to_bytes(_CULPRIT_BYTES, "little") + note)


def beat() -> Tensor:
    """A sign of life."""
    return _message(b"")


def _message(content: bytes) -> Tensor:
    message = empty()
    packed = _HEAD.pack(_HEAD.size + len(content), 0) + content
    ctypes.memmove(message.data_ptr(), packed, len(packed))
    return message


def rest_of(first: Tensor) -> int:
    """How many bytes follow in a second message, given the first."""
    return max(_head(first)[0] - FIRST_BYTES, 0)


def failure_in(first: Tensor) -> tuple[int, str] | None:
    """The culprit and the text, if a message is about a failure."""
    num_bytes, count = _head(first)
    if count or num_bytes == _HEAD.size:
        return None
    content = ctypes.string_at(first.data_ptr() + _HEAD.size, num_bytes - _HEAD.size)
    return int.from_bytes(content[:_CULPRIT_BYTES], "little"), content[_CULPRIT_BYTES:].decode(errors="replace")


def take_posts(base: int, first: Tensor, rest: Tensor | None) -> None:
    """Post what a message brings in the slots of this machine.

    Raises:
        RuntimeError: It is not what a bridge sends.
    """
    whole = first[:FIRST_BYTES] if rest is None else torch.cat([first[:FIRST_BYTES], rest])
    if not core.take_posts(base, whole.data_ptr(), whole.numel()):
        raise RuntimeError("a message came that no bridge sends; install the same version of evenstep on every machine")


def _head(first: Tensor) -> tuple[int, int]:
    num_bytes, count = _HEAD.unpack(ctypes.string_at(first.data_ptr(), _HEAD.size))
    return num_bytes, count
