"""The links between the machines of a generation: bytes to and from each other one, in order, by torch.distributed.

There are four channels: words, which workers wait for; the rest of long ones; ranges of memory; and their heads, which
say where they belong. Ranges have connections of their own, so that words need not wait for them. Heads go ahead
beside the words: so the next ranges are expected while one is still on its way, and a connection never idles until
somebody has answered.

A message other than a range ends in `SEAL_BYTES` that are the links' own: there goes its checksum.
"""

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from evenstep.core.errors import ConfigError
from evenstep.native import core

__all__ = [
    "ALTERED",
    "BACKENDS",
    "CHANNELS",
    "HEADS",
    "RANGES",
    "REST",
    "SEAL_BYTES",
    "WORDS",
    "GlooLinks",
    "Links",
    "SealedLinks",
    "Transfer",
    "address_towards",
    "check_backend",
    "connect",
    "gloo",
    "seal_of",
]

WORDS, HEADS, RANGES, REST = 0, 1, 2, 3
ALTERED = "what has come is not what was sent: the checksums differ, so a machine or a link alters data"
CHANNELS = 4
BACKENDS = ("gloo", "nccl", "mpi", "ucc")
SEAL_BYTES = 8
_CONNECTIONS = 3  # one for words and heads, and one for ranges in each direction: gloo does not do both at once
_FOREVER = timedelta(days=365)  # finding out which machine is lost is not the links' task


class Transfer(Protocol):
    """Something on its way."""

    def wait(self) -> Any:
        """Wait until the bytes have left, or are here.

        Raises:
            RuntimeError: The other machine is lost, or what has come is not what it sent.
        """


class Links(Protocol):
    """One machine's ends.

    Attributes:
        machine: Which one this is.
        count: How many there are.
    """

    machine: int
    count: int

    def send(self, machine: int, channel: int, data: Tensor) -> Transfer:
        """Start to send bytes [n], n a multiple of 8 except for ranges; they must stay until it is over."""

    def receive(self, machine: int, channel: int, data: Tensor) -> Transfer:
        """Start to receive bytes [n], as many as were sent; they are there when it is over.

        What is received is in the order of these calls.
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
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch leaves it untyped
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
        RuntimeError: They took longer.
    """

    def __init__(self, store: Any, machine: int, count: int, address: str | None, timeout_s: float) -> None:
        self.machine, self.count = machine, count
        self._connections: list[Any] = []  # torch has no type for them
        for number in range(_CONNECTIONS):
            group = gloo(PrefixStore(f"connection {number}", store), machine, count, address, timeout_s)
            group.set_timeout(_FOREVER)
            self._connections.append(group)

    def send(self, machine: int, channel: int, data: Tensor) -> Transfer:
        """See `Links`."""
        link: Transfer = self._way(channel, self.machine, machine).send([data], machine, channel)
        return link

    def receive(self, machine: int, channel: int, data: Tensor) -> Transfer:
        """See `Links`."""
        return _Arrival(self._way(channel, machine, self.machine).recv([data], machine, channel))

    def _way(self, channel: int, source: int, target: int) -> Any:
        return self._connections[0 if channel != RANGES else 1 if source < target else 2]


@dataclass(frozen=True)
class _Arrival:
    """Something that gloo will receive."""

    work: Any

    def wait(self) -> None:
        """See `Transfer`."""
        self.work.wait(_FOREVER)


class _OtherLinks:
    """Links by any other backend of torch.distributed, in a process that has no other use for it."""

    def __init__(self, backend: str, store: Any, machine: int, count: int, timeout_s: float) -> None:
        self.machine, self.count = machine, count
        check_backend(backend)
        self._device = torch.device("cuda", machine % torch.cuda.device_count()) if backend == "nccl" else None
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=machine, world_size=count, timeout=timeout)
        self._channels = [dist.new_group(timeout=_FOREVER) for _ in range(CHANNELS)]

    def send(self, machine: int, channel: int, data: Tensor) -> Transfer:
        staged = data if self._device is None else data.to(self._device)
        work = dist.isend(staged, machine, self._channels[channel])
        assert work is not None, "this machine is in the group"
        return work

    def receive(self, machine: int, channel: int, data: Tensor) -> Transfer:
        staged = data if self._device is None else torch.empty_like(data, device=self._device)
        work = dist.irecv(staged, machine, self._channels[channel])
        assert work is not None, "this machine is in the group"
        return work if staged is data else _Staged(work, staged, data)


@dataclass(frozen=True)
class _Staged:
    """Something that is received on a GPU, for memory of the host."""

    work: Transfer
    staged: Tensor
    data: Tensor

    def wait(self) -> None:
        """See `Transfer`."""
        self.work.wait()
        self.data.copy_(self.staged)


class SealedLinks:
    """Links whose messages carry a checksum; see `Links`. What was altered on its way is not taken in.

    Ranges travel as they are: their heads carry their checksums.

    Args:
        links: Those that carry the bytes.
    """

    def __init__(self, links: Links) -> None:
        self._links, self.machine, self.count = links, links.machine, links.count

    def send(self, machine: int, channel: int, data: Tensor) -> Transfer:
        """See `Links`."""
        if channel != RANGES:
            core.store(data.data_ptr() + data.numel() - SEAL_BYTES, seal_of(data[:-SEAL_BYTES]))
        return self._links.send(machine, channel, data)

    def receive(self, machine: int, channel: int, data: Tensor) -> Transfer:
        """See `Links`."""
        arrival = self._links.receive(machine, channel, data)
        return arrival if channel == RANGES else _SealedArrival(arrival, data, machine, self.machine)


@dataclass(frozen=True)
class _SealedArrival:
    """A message that will come, with its checksum."""

    arrival: Transfer
    data: Tensor
    source: int
    target: int

    def wait(self) -> None:
        """See `Transfer`."""
        self.arrival.wait()
        if core.load(self.data.data_ptr() + self.data.numel() - SEAL_BYTES) != seal_of(self.data[:-SEAL_BYTES]):
            size = self.data.numel() - SEAL_BYTES
            raise RuntimeError(f"{ALTERED} ({size} bytes from machine {self.source} to machine {self.target})")


def seal_of(data: Tensor) -> int:
    """The checksum of bytes, without its first bit: so that it fits into a signed word."""
    return core.checksum(data.data_ptr(), data.numel()) >> 1


def connect(backend: str, store: Any, machine: int, count: int, address: str | None, timeout_s: float) -> Links:
    """Connect this machine with all others; blocks until all have come.

    Raises:
        RuntimeError: They did not come in time.
    """
    if backend == "gloo":
        return SealedLinks(GlooLinks(store, machine, count, address, timeout_s))
    return SealedLinks(_OtherLinks(backend, store, machine, count, timeout_s))


def check_backend(backend: str) -> None:
    """Check that this build of torch has a backend.

    Raises:
        ConfigError: It does not.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--between {backend}, expected one of {', '.join(BACKENDS)}")
    if not getattr(dist, f"is_{backend}_available")():
        raise ConfigError(f"--between {backend}: this build of torch has no {backend}; use gloo, the default")
    if backend == "nccl" and not torch.cuda.is_available():
        raise ConfigError("--between nccl: this machine has no GPU, which NCCL needs; use gloo, the default")
