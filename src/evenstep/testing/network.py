"""Simulated machines: network namespaces around a bridge, with links that can be cut, shaped and counted.

Needs root and the `ip` command; `tc` to limit rates. Everything is gone when a `Namespaces` is closed.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from evenstep.core.children import Child
from evenstep.testing.relay import relay

__all__ = ["Namespaces", "descendants", "missing"]


def missing() -> str | None:
    """Why there can be no such network here; None if there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    name = f"es-probe-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    except FileNotFoundError:
        return "there is no ip command"
    if made.returncode != 0:
        return "network namespaces cannot be made here"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


def descendants(pid: int) -> list[int]:
    """A process and all its living descendants."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(entry)] = int(parent)
    found, grown = [pid], True
    while grown:
        more = [child for child, parent in parents.items() if parent in found and child not in found]
        found, grown = found + more, bool(more)
    return found


class Namespaces:
    """Several machines that reach each other. A context manager.

    Args:
        count: How many there are.
        delay_s: How long traffic of every machine but the first takes, in each direction.
        loss: The share of that traffic that is lost; see `relay.missing` for where this is not possible.

    Attributes:
        addresses: The address of each machine.
    """

    def __init__(self, count: int, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        self._delay_s, self._loss = delay_s, loss
        self._relays: list[Child] = []
        self._tag = f"{os.getpid() % 100000}"
        self.count = count
        self.addresses = [f"10.77.{os.getpid() % 250}.{machine + 1}" for machine in range(count)]
        self._started: list[subprocess.Popen[str]] = []
        self._closing: list[Callable[[], None]] = []

    def __enter__(self) -> "Namespaces":
        try:
            self._ip("link", "add", self._bridge, "type", "bridge")
            self._ip("link", "set", self._bridge, "up")
            for machine, address in enumerate(self.addresses):
                space, link = self.space(machine), self.link(machine)
                self._ip("netns", "add", space)
                self._name_hosts(space)
                if machine and (self._delay_s or self._loss):
                    self._relays.append(relay((link, f"{link}i"), self._delay_s, self._loss))
                    self._ip("link", "set", f"{link}i", "netns", space, "name", "eth0", "txqueuelen", "10000")
                    self._ip("link", "set", link, "txqueuelen", "10000")
                else:
                    self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
                self._ip("link", "set", link, "master", self._bridge, "up")
                self._ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                self._ip("-n", space, "link", "set", "eth0", "up")
                self._ip("-n", space, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        for close in self._closing:
            close()
        for process in self._started:
            if process.poll() is None:
                for pid in descendants(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.communicate()
        for child in self._relays:
            child.kill()
        for machine in range(self.count):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._ip("link", "del", self.link(machine))
            with contextlib.suppress(subprocess.CalledProcessError):
                self._ip("netns", "del", self.space(machine))
            shutil.rmtree(f"/etc/netns/{self.space(machine)}", ignore_errors=True)
        with contextlib.suppress(subprocess.CalledProcessError):
            self._ip("link", "del", self._bridge)

    def _name_hosts(self, space: str) -> None:
        """Take host names from a file: asking an unreachable name server takes seconds."""
        folder = Path(f"/etc/netns/{space}")
        folder.mkdir(parents=True)
        hosts = [f"{address} machine{machine}" for machine, address in enumerate(self.addresses)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (folder / "nsswitch.conf").write_text("hosts: files\n")

    @property
    def _bridge(self) -> str:
        return f"esb{self._tag}"

    def space(self, machine: int) -> str:
        """The name of a machine's namespace."""
        return f"es{self._tag}-{machine}"

    def link(self, machine: int) -> str:
        """The name of the outer end of a machine's link."""
        return f"esl{self._tag}-{machine}"

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def start(self, machine: int, *argv: str | Path, apart: bool = False, **options: Any) -> "subprocess.Popen[str]":
        """Start a program on a machine.

        Args:
            machine: The machine.
            argv: The program and its arguments.
            apart: Whether its processes see only each other, as on another machine.
            options: For Popen.
        """
        prefix = ["ip", "netns", "exec", self.space(machine)]
        if apart:
            prefix += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        defaults: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([*prefix, *map(str, argv)], **{**defaults, **options})
        self._started.append(process)
        return process

    def evenstep(self, machine: int, *argv: str | Path, **options: Any) -> "subprocess.Popen[str]":
        """Start our command line on a machine."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("variables", {})}
        return self.start(machine, sys.executable, "-m", "evenstep", *argv, env=environment, **options)

    def closing(self, close: Callable[[], None]) -> None:
        """Register something to call before the network is gone."""
        self._closing.append(close)

    def cut(self, machine: int) -> None:
        """Take the link of a machine down: nothing gets through, and nobody is told."""
        self._ip("link", "set", self.link(machine), "down")

    def mend(self, machine: int) -> None:
        """Bring the link up again, so that it reaches everybody."""
        self._ip("link", "set", self.link(machine), "up")
        self._ip("link", "set", "dev", self.link(machine), "type", "bridge_slave", "isolated", "off")

    def part(self, *machines: int) -> None:
        """Make these machines reach the others, but not each other."""
        for machine in machines:
            self._ip("link", "set", "dev", self.link(machine), "type", "bridge_slave", "isolated", "on")

    def limit(self, rate: str) -> None:
        """Limit the rate at which every machine sends, such as to "1gbit"."""
        for machine in range(self.count):
            for where, dev in ((["-n", self.space(machine)], "eth0"), ([], self.link(machine))):
                shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                subprocess.run(
                    ["tc", *where, "qdisc", "replace", "dev", dev, "root", *shape], check=True, capture_output=True
                )

    def sent_bytes(self, machine: int) -> int:
        """How many bytes a machine has sent so far."""
        return int(Path(f"/sys/class/net/{self.link(machine)}/statistics/rx_bytes").read_text())
