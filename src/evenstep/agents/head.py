"""The handle that the caller of a run on a cluster holds on its head.

The head runs on the caller's machine: if that machine is lost, so is the run; any other may be lost. Importing this
module does not import torch: only the head's own process needs it (`head_process.py`).
"""

import fcntl
import json
import os
import selectors
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

from evenstep.agents import process
from evenstep.agents.work import ShippedWork
from evenstep.core.control import ask
from evenstep.core.errors import ConfigError

__all__ = ["Head", "HeadOrder", "figures_for"]

Report = dict[str, Any]
_ENDING_S = 5.0
_PIPE_BYTES = 1 << 20  # the caller may be far away, and a trace is long


@dataclass(frozen=True)
class HeadOrder:
    """What a head is asked to do.

    Attributes:
        host: The address of this machine at which agents connect.
        token: The secret that agents must present.
        awaited: How many workers must be offered before the first step.
        workers: How many workers the head itself has; 0: one that only keeps the state.
        shards: Parts of every batch; None: as the script says.
        max_restarts: How many workers may be replaced; None: any number.
        step_timeout_s: How long a step may take; None: as the script says.
        resume: Whether to continue from the newest checkpoint.
        trace: The file that the caller writes a trace to, of which the head reports the events; None: there is none.
        log_json: The file, on the head's machine, that gets a line of JSON for every step.
        tensorboard: The directory, on the head's machine, for TensorBoard event files.
        page: The port of the page of the run, on the head's machine; 0: any; None: there is no page.
    """

    host: str
    token: str
    awaited: int
    workers: int = 0
    shards: int | None = None
    max_restarts: int | None = None
    step_timeout_s: float | None = None
    resume: bool = False
    trace: str | None = None
    log_json: str | None = None
    tensorboard: str | None = None
    page: int | None = None


def figures_for(
    trace: str | Path | None, log_json: str | Path | None, tensorboard: str | Path | None, page: int | None
) -> dict[str, Any]:
    """Where the figures of a run go, as an order has it: paths as the caller means them, wherever the head runs."""
    paths = {"trace": trace, "log_json": log_json, "tensorboard": tensorboard}
    named = {name: None if path is None else str(Path(path).absolute()) for name, path in paths.items()}
    return {**named, "page": page}


class Head:
    """A head in a process of its own, which ends with the thread that created this object. A context manager.

    Attributes:
        address: Where agents connect; open as soon as this object exists.
        code: The exit code, once the head has ended and all its reports have been read.

    Raises:
        ConfigError: The host is not an address of this machine.
    """

    def __init__(self, work: ShippedWork, order: HeadOrder) -> None:
        with _listening(order.host) as door:
            reading, writing = os.pipe()
            with suppress(PermissionError):  # this user has many pipes
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._result = os.memfd_create("evenstep result", 0)
            self.address: tuple[str, int] = (order.host, door.getsockname()[1])
            given = (door.fileno(), writing, self._result)
            self._process = process.begin("evenstep.agents.head_process", list(map(str, given)), err=PIPE, keep=given)
        os.close(writing)
        self.code: int | None = None
        self._pipes: dict[int, tuple[str, bytes]] = {}  # by descriptor: what it carries, and the start of its next line
        self._selector = selectors.DefaultSelector()
        assert self._process.stdout is not None, "the process was started with pipes"
        assert self._process.stderr is not None, "the process was started with pipes"
        self._events = os.fdopen(reading, "rb", buffering=0)
        for kind, pipe in (("out", self._process.stdout), ("err", self._process.stderr), ("event", self._events)):
            self._pipes[pipe.fileno()] = (kind, b"")
            self._selector.register(pipe, selectors.EVENT_READ)
        text, data = work.pack()
        process.send(self._process.stdin, {"order": asdict(order), "work": text}, data)

    def __enter__(self) -> "Head":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id of the head."""
        return self._process.pid

    def reports(self, timeout_s: float) -> list[Report]:
        """What the head has said, waiting at most `timeout_s`: lines under "out" and "err", events under "event"."""
        found: list[Report] = []
        for key, _ in self._selector.select(max(timeout_s, 0.0)):
            kind, begun = self._pipes[key.fd]
            data = os.read(key.fd, 1 << 20)
            *lines, rest = (begun + data).split(b"\n")
            if not data:
                self._selector.unregister(key.fd)
                lines += [rest] if rest and kind != "event" else []  # the head was killed in the middle of an event
            self._pipes[key.fd] = (kind, rest)
            found += [_report(kind, line) for line in lines]
        if not self._selector.get_map() and self.code is None:
            self.code = self._process.wait(_ENDING_S)
        return found

    @property
    def result(self) -> bytes | None:
        """What worker 0 returned, if it has."""
        size = os.fstat(self._result).st_size
        return os.pread(self._result, size, 0) if size else None

    def stop(self) -> None:
        """Ask the run to stop after this step; a second call stops it at once."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    @property
    def has_begun(self) -> bool:
        """Whether the workers have met."""
        try:
            return bool(ask({}, self.pid)["generation"])
        except ConfigError:
            return False  # the head is starting or ending

    def wait_for(self, num_workers: int) -> bool:
        """Make the first step wait for this many workers, no more; False: the head is starting or ending, and deaf."""
        try:
            ask({"await": num_workers}, self.pid)
        except ConfigError:
            return False
        return True

    def close(self) -> None:
        """End the head and its worker."""
        self._process.kill()
        self._process.wait()
        self._selector.close()
        assert self._process.stdin is not None, "the process was started with pipes"
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr, self._events):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]  # the process was started with pipes
        os.close(self._result)


def _report(kind: str, line: bytes) -> Report:
    return {kind: json.loads(line) if kind == "event" else line.decode(errors="replace")}


def _listening(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), family=socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0])
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} ({error.strerror or error}); expected an address of this machine that the "
            "cluster can reach"
        ) from error
