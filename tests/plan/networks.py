"""Racks of machines as network namespaces: real TCP over links that `tc` has made slow.

Each machine is a namespace with a network card of limited rate; each rack is a namespace with a bridge, and racks are
joined by uplinks of limited rate. Needs root; `Racks.why_not()` says why it cannot be had.
"""

import contextlib
import ctypes
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence

from evenstep.native import core

PORT = 7011
CLONE_NEWNET = 0x40000000
Messages = Sequence[tuple[int, int, int]]  # from, to, bytes


def why_not() -> str | None:
    """Why there can be no racks here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed"
    probe = f"estopo{os.getpid()}p"
    try:
        done = _run(f"ip netns add {probe}", check=False)
        if done.returncode == 0:
            done = _run(
                f"ip netns exec {probe} tc qdisc add dev lo root tbf rate 10mbit burst 16k latency 50ms", check=False
            )
        return None if done.returncode == 0 else f"no namespaces or no tbf: {done.stderr.strip()}"
    finally:
        _run(f"ip netns del {probe}", check=False)


def _run(command: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command.split(), check=check, capture_output=True, text=True)


class Racks:
    """Machines in racks. A context manager: all namespaces are gone afterwards.

    Args:
        racks: The rack of each machine; two racks.
        card_bits: What a machine sends in a second.
        uplink_bits: What a rack sends to the other in a second.
    """

    def __init__(self, racks: Sequence[int], card_bits: int, uplink_bits: int) -> None:
        self._racks, self._card, self._uplink = racks, card_bits, uplink_bits
        self._name = f"estopo{os.getpid()}"
        self._spaces = [f"{self._name}r{rack}" for rack in (0, 1)] + [f"{self._name}m{m}" for m in range(len(racks))]

    def __enter__(self) -> "Racks":
        try:
            for space in self._spaces:
                _run(f"ip netns add {space}")
            for rack in (0, 1):
                self._in(f"r{rack}", "ip link add br0 type bridge")
                self._in(f"r{rack}", "ip link set br0 up")
            _run(f"ip link add uplink netns {self._name}r0 type veth peer name uplink netns {self._name}r1")
            for rack in (0, 1):
                self._in(f"r{rack}", "ip link set uplink master br0 up")
                self._limit(f"r{rack}", "uplink", self._uplink)
            for machine, rack in enumerate(self._racks):
                port, name = f"to{machine}", self._name
                _run(f"ip link add card netns {name}m{machine} type veth peer name {port} netns {name}r{rack}")
                self._in(f"r{rack}", f"ip link set {port} master br0 up")
                self._limit(f"r{rack}", port, self._card)  # what comes in
                self._limit(f"m{machine}", "card", self._card)  # what goes out
                self._in(f"m{machine}", f"ip addr add {self._address(machine)}/24 dev card")
                self._in(f"m{machine}", "ip link set lo up")
                self._in(f"m{machine}", "ip link set card up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for space in self._spaces:
            _run(f"ip netns del {space}", check=False)

    def seconds(self, rounds: Sequence[Messages], timeout_s: float = 30.0) -> float:
        """How long rounds of messages take, one round after the other: a process for each machine does its part."""
        count = len(self._racks)
        pipes = [(os.pipe(), os.pipe()) for _ in range(count)]  # orders in, answers out
        pids: list[int] = []
        try:
            for machine in range(count):
                pid = os.fork()
                if pid == 0:
                    self._be_machine(machine, rounds, pipes[machine][0][0], pipes[machine][1][1])
                pids.append(pid)
            answers, orders = [answer[0] for _, answer in pipes], [order[1] for order, _ in pipes]
            _all_say(answers, timeout_s)  # everyone is connected
            begin = time.perf_counter()
            for _ in rounds:
                for order in orders:
                    os.write(order, b"g")
                _all_say(answers, timeout_s)
            return time.perf_counter() - begin
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
                os.waitpid(pid, 0)
            for pair in pipes:
                for fd in (*pair[0], *pair[1]):
                    os.close(fd)

    def _be_machine(self, me: int, rounds: Sequence[Messages], order: int, answer: int) -> None:
        try:
            core.die_with_parent()
            with open(f"/run/netns/{self._name}m{me}") as space:
                entered = ctypes.CDLL(None).setns(space.fileno(), CLONE_NEWNET)
            assert entered == 0, "the namespace cannot be entered"
            server = socket.create_server((self._address(me), PORT), backlog=16)
            peers = {(a, b) for messages in rounds for a, b, _ in messages}
            sends = {b: _connect(self._address(b), me) for a, b in sorted(peers) if a == me}
            receives: dict[int, socket.socket] = {}
            for _ in [a for a, b in peers if b == me]:
                connection, _ = server.accept()
                receives[connection.recv(1)[0]] = connection
            os.write(answer, b"r")
            for messages in rounds:
                os.read(order, 1)
                _take_part(
                    {sends[b]: size for a, b, size in messages if a == me},
                    {receives[a]: size for a, b, size in messages if b == me},
                )
                os.write(answer, b"r")
        finally:
            os._exit(0)

    def _address(self, machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    def _in(self, space: str, command: str) -> None:
        _run(f"ip netns exec {self._name}{space} {command}")

    def _limit(self, space: str, device: str, bits: int) -> None:
        self._in(space, f"tc qdisc add dev {device} root tbf rate {bits}bit burst 16k latency 400ms")


def _connect(address: str, me: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection((address, PORT), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            connection.sendall(bytes([me]))
            return connection


def _all_say(answers: Sequence[int], timeout_s: float) -> None:
    for answer in answers:
        if not select.select([answer], [], [], timeout_s)[0] or not os.read(answer, 1):
            raise TimeoutError("a machine says nothing")


def _take_part(sends: dict[socket.socket, int], receives: dict[socket.socket, int]) -> None:
    """Send and receive so many bytes at the same time."""
    block = bytes(1 << 16)
    for each in (*sends, *receives):
        each.setblocking(False)
    while sends or receives:
        readable, writable, _ = select.select(list(receives), list(sends), [], 20)
        if not readable and not writable:
            raise TimeoutError("no byte moves")
        for each in readable:
            receives[each] -= len(each.recv(min(receives[each], 1 << 16)))
            if not receives[each]:
                del receives[each]
        for each in writable:
            sends[each] -= each.send(block[: sends[each]])
            if not sends[each]:
                del sends[each]
