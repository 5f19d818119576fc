"""The links between the machines of a generation: bytes to and from each other one, in order, by torch.distributed.

There are two lanes, so that a large range on its way does not hold up what workers wait for.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from evenstep.core import points
from evenstep.core.errors import ConfigError
from evenstep.native import core

__all__ = [
    "ALTERED",
    "BACKENDS",
    "LANES",
    "RANGES",
    "WORDS",
    "GlooLinks",
    "Links",
    "SealedLinks",
    "Transfer",
    "address_towards",
    "check_backend",
    "connect",
    "gloo",
]

WORDS, RANGES = 0, 1
ALTERED = "what has come is not what was sent: the checksums differ, so a machine or a link alters data"
LANES = 2
BACKENDS = ("gloo", "nccl", "mpi", "ucc")
_SEAL_BYTES = 8
_TOGETHER_BYTES = 1 << 16  # up to here a message is copied, to go as one with its checksum
_FOREVER = timedelta(days=365)  # who is lost is not for us to find out


class Transfer(Protocol):
    """Something on its way."""

    def wait(self) -> Any:
        """Wait until the memory may be used again.

        Raises:
            RuntimeError: The other machine is lost.
        """


class Links(Protocol):
    """One machine's ends.

    Attributes:
        machine: Which one this is.
        count: How many there are.
    """

    machine: int
    count: int

    def send(self, machine: int, lane: int, data: Tensor) -> Transfer:
        """Start to send bytes [n]; they must stay until it is over."""

    def receive(self, machine: int, lane: int, data: Tensor) -> None:
        """Receive bytes [n], as many as were sent. Blocks.

        Raises:
            RuntimeError: The other machine is lost.
        """


def gloo(store: Any, rank: int, size: int, address: str | None, timeout_s: float) -> Any:
    """A process group by gloo, over TCP. All ranks must make it; blocks until all have.

    Args:
        store: Where the ranks find each other.
        rank: Which one this is.
        size: How many there are.
        address: The address under which the others reach this one; None: torch finds it (by GLOO_SOCKET_IFNAME).
        timeout_s: How long they may take, and each operation.

    Raises:
        RuntimeError: They do not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    if address is None:
        return ProcessGroupGloo(store, rank, size, timeout)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch does not say that it has them
    options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=address)], timeout
    return ProcessGroupGloo(store, rank, size, options)


def address_towards(host: str, port: int) -> str | None:
    """The address of this machine on the way to another; None if there is no way."""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # which sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


class GlooLinks:
    """Links by gloo, over TCP.

    Args:
        store: Where the machines find each other.
        machine: Which one this is.
        count: How many there are.
        address: The address under which the others reach this one; None: that of its host name.
        timeout_s: How long they may take to find each other.

    Raises:
        RuntimeError: They do not.
    """

    def __init__(self, store: Any, machine: int, count: int, address: str | None, timeout_s: float) -> None:
        self.machine, self.count = machine, count
        self._lanes: list[Any] = []  # torch does not say what they can do
        for lane in range(LANES):
            group = gloo(PrefixStore(f"lane {lane}", store), machine, count, address, timeout_s)
            group.set_timeout(_FOREVER)
            self._lanes.append(group)

    def send(self, machine: int, lane: int, data: Tensor) -> Transfer:
        """See `Links`."""
        link: Transfer = self._lanes[lane].send([data], machine, 0)
        return link

    def receive(self, machine: int, lane: int, data: Tensor) -> None:
        """See `Links`."""
        self._lanes[lane].recv([data], machine, 0).wait(_FOREVER)


class _OtherLinks:
    """Links by any other backend of torch.distributed, in a process that has no other use for it."""

    def __init__(self, backend: str, store: Any, machine: int, count: int, timeout_s: float) -> None:
        self.machine, self.count = machine, count
        check_backend(backend)
        self._device = torch.device("cuda", machine % torch.cuda.device_count()) if backend == "nccl" else None
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=machine, world_size=count, timeout=timeout)
        self._lanes = [dist.new_group(timeout=_FOREVER) for _ in range(LANES)]

    def send(self, machine: int, lane: int, data: Tensor) -> Transfer:
        staged = data if self._device is None else data.to(self._device)
        work = dist.isend(staged, machine, self._lanes[lane])
        assert work is not None, "this machine is in the group"
        return work

    def receive(self, machine: int, lane: int, data: Tensor) -> None:
        staged = data if self._device is None else torch.empty_like(data, device=self._device)
        dist.recv(staged, machine, self._lanes[lane])
        if staged is not data:
            data.copy_(staged)


class SealedLinks:
    """Links whose messages carry a checksum; see `Links`. What was altered on its way is not taken in.

    Args:
        links: Those that carry the bytes.
    """

    def __init__(self, links: Links) -> None:
        self._links, self.machine, self.count = links, links.machine, links.count

    def send(self, machine: int, lane: int, data: Tensor) -> Transfer:
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
            raise RuntimeError(f"{ALTERED} ({data.numel()} bytes from machine {machine} to machine {self.machine})")


def _seal(data: Tensor) -> Tensor:
    number = core.checksum(data.data_ptr(), data.numel())
    return torch.frombuffer(bytearray(number.to_bytes(_SEAL_BYTES, "little")), dtype=torch.uint8)


@dataclass(frozen=True)
class _Sent:
    """A message on its way, and the memory that must stay until it has left."""

    links: Sequence[Transfer]
    held: Sequence[Tensor]

    def wait(self) -> None:
        """See `Transfer`."""
        for link in self.links:
            link.wait()


def connect(backend: str, store: Any, machine: int, count: int, address: str | None, timeout_s: float) -> Links:
    """Connect this machine with all others; blocks until all have come.

    Raises:
        RuntimeError: They did not come in time.
    """
    if backend == "gloo":
        return SealedLinks(GlooLinks(store, machine, count, address, timeout_s))
    return SealedLinks(_OtherLinks(backend, store, machine, count, timeout_s))


def check_backend(backend: str) -> None:
    """See that this build of torch has a backend.

    Raises:
        ConfigError: It has not.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--between {backend}, expected one of {', '.join(BACKENDS)}")
    if not getattr(dist, f"is_{backend}_available")():
        raise ConfigError(f"--between {backend}: this build of torch has no {backend}; use gloo, the default")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--between nccl: this machine has no GPU, which NCCL needs; use gloo, the default")
