"""A link with delay and packet loss, for kernels that cannot do that themselves.

The ends of the link are tap devices; a process reads what is sent into one and, a while later, writes it to the other.
"""

import fcntl
import os
import random
import select
import stat
import struct
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from evenstep.core.children import Child, default_signals, fork

__all__ = ["missing", "relay"]

_DEVICE = Path("/dev/net/tun")
_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x0002 | 0x1000
_MOST_BYTES = 1 << 16


def missing() -> str | None:
    """Why there can be no relay here; None if there can. Creates the device if possible."""
    try:
        if not _DEVICE.exists():
            _DEVICE.parent.mkdir(exist_ok=True)
            os.mknod(_DEVICE, 0o600 | stat.S_IFCHR, os.makedev(10, 200))
        os.close(os.open(_DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{_DEVICE} cannot be used: {error.strerror}"
    return None


def relay(ends: tuple[str, str], delay_s: float, loss: float) -> Child:
    """Make two devices and carry what is sent into each to the other, in a process that ends with this one.

    Args:
        ends: The names of the devices; they may be moved to other namespaces.
        delay_s: How long everything takes, in each direction.
        loss: The share of packets that is lost, in each direction.
    """
    fds = [_open(name) for name in ends]
    try:
        return fork(lambda: _carry(fds, delay_s, loss), keep=set(fds))
    finally:
        for fd in fds:
            os.close(fd)


def _open(name: str) -> int:
    fd = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return fd


def _carry(fds: list[int], delay_s: float, loss: float) -> int:
    default_signals()
    dice, under_way = random.Random(0), deque[tuple[float, int, bytes]]()
    other = dict(zip(fds, reversed(fds), strict=True))
    while True:
        wait_s = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
        for fd in select.select(fds, [], [], wait_s)[0]:
            with suppress(BlockingIOError):
                while True:
                    packet = os.read(fd, _MOST_BYTES)
                    if dice.random() >= loss:
                        under_way.append((time.monotonic() + delay_s, other[fd], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, fd, packet = under_way.popleft()
            with suppress(OSError):  # that end is down: the packet is lost, as on a cut cable
                os.write(fd, packet)
