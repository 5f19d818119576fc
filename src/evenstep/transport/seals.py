"""Links whose messages carry a checksum: what was altered on its way, by a wire or a memory, is not taken in."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.core import points
from evenstep.native import core
from evenstep.transport.links import RANGES, Link, Links

__all__ = ["SealedLinks"]

_SEAL_BYTES = 8
_TOGETHER_BYTES = 1 << 16  # up to here a message is copied, to go as one with its seal


class SealedLinks:
    """Links over others; see `Links`. Both ends must have them.

    Args:
        links: Those that carry the bytes.
    """

    def __init__(self, links: Links) -> None:
        self._links, self.machine, self.count = links, links.machine, links.count

    def send(self, machine: int, lane: int, data: Tensor) -> Link:
        """See `Links`."""
        seal = _seal(data)
        if data.numel() <= _TOGETHER_BYTES:
            whole = torch.cat([data, seal])
            return _Sent([self._links.send(machine, lane, whole)], [whole])
        return _Sent([self._links.send(machine, lane, each) for each in (data, seal)], [data, seal])

    def receive(self, machine: int, lane: int, data: Tensor) -> None:
        """See `Links`.

        Raises:
            RuntimeError: The other machine is lost, or what has come is not what it sent.
        """
        if data.numel() <= _TOGETHER_BYTES:
            whole = torch.empty(data.numel() + _SEAL_BYTES, dtype=torch.uint8)
            self._links.receive(machine, lane, whole)
            seal = whole[data.numel() :]
            data.copy_(whole[: data.numel()])
        else:
            seal = torch.empty(_SEAL_BYTES, dtype=torch.uint8)
            self._links.receive(machine, lane, data)
            self._links.receive(machine, lane, seal)
        if lane == RANGES:
            points.touch("node", data)
        if not torch.equal(_seal(data), seal):
            raise RuntimeError(
                f"{data.numel()} bytes that machine {machine} sent to machine {self.machine} are not what has come: "
                "their checksums differ, so one of both, or what is between them, alters data"
            )


def _seal(data: Tensor) -> Tensor:
    number = core.checksum(data.data_ptr(), data.numel())
    return torch.frombuffer(bytearray(number.to_bytes(_SEAL_BYTES, "little")), dtype=torch.uint8)


@dataclass(frozen=True)
class _Sent:
    """A message on its way, and the memory that must stay until it has left."""

    links: Sequence[Link]
    held: Sequence[Tensor]

    def wait(self) -> None:
        """See `Link`."""
        for link in self.links:
            link.wait()
