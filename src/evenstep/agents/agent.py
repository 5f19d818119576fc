"""What a cluster's own process has of a node: starts it, gives orders, hears what comes, and ends it."""

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenstep.agents.orders import End, Order
from evenstep.agents.shipping import MODULE
from evenstep.core import env
from evenstep.core.errors import SilenceError

__all__ = ["Agent", "ends_of"]

_ENDING_S = 5.0


class Agent:
    """Looks after a node from the process that starts it, which it does not outlive. Use it as a context manager.

    Args:
        directory: Where its workers run; None: here.
        variables: What the node finds in its environment in addition.

    Attributes:
        folder: A directory of its own for a function and what it returns; gone at the end.
    """

    def __init__(self, directory: str | None = None, variables: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="evenstep-"))
        command = [sys.executable, "-m", "evenstep.agents.node", str(self.folder)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=directory,
            env=env.of_child({"OMP_NUM_THREADS": "1", **(variables or {})}),
            start_new_session=True,
        )
        assert self._process.stdout is not None, "it was asked for"
        self._reports = self._process.stdout.fileno()
        os.set_blocking(self._reports, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reports, selectors.EVENT_READ)
        self._begun = b""
        self._facts: dict[str, str] | None = None
        self.num_running = 0

    def __enter__(self) -> "Agent":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id of the node."""
        return self._process.pid

    def facts(self, timeout_s: float) -> dict[str, str]:
        """Wait until the node is ready; returns its versions.

        Raises:
            SilenceError: It has ended, or is not ready in time.
        """
        if self._facts is None:
            self._facts = dict(self._await("ready", timeout_s))
        return self._facts

    def host(self, timeout_s: float) -> int:
        """Let the node host what the workers of the next attempt find each other by; returns the port.

        Raises:
            SilenceError: It has ended, or does not answer in time.
        """
        self._send({"host": True})
        return int(self._await("port", timeout_s))

    def _await(self, what: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for report in self.reports(deadline - time.monotonic()):
                if what in report:
                    return report[what]
        raise SilenceError(f"a node's process did not say {what!r} within {timeout_s:g} s; look at what it does")

    def function(self, data: bytes) -> tuple[str, tuple[str, ...]]:
        """Put a shipped function where workers find it; returns the script and arguments that call it."""
        held, result = self.folder / "function", self.folder / "result"
        held.write_bytes(data)
        result.unlink(missing_ok=True)
        return MODULE, (str(held), str(result))

    def script(self, path: str, text: str) -> str:
        """The path of a script here: its own, or that of a copy where there is none."""
        if Path(path).is_file():
            return path
        copy = self.folder / Path(path).name
        copy.write_text(text)
        return str(copy)

    def result(self) -> bytes | None:
        """What worker 0 has returned, if it was here."""
        path = self.folder / "result"
        return path.read_bytes() if path.exists() else None

    def start(self, order: Order) -> None:
        """Let the node start workers."""
        self.num_running = len(order.workers)
        self._send({"start": asdict(order)})

    def stop(self) -> None:
        """Let the node end its workers."""
        self._send({"stop": True})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def reports(self, timeout_s: float) -> list[dict[str, Any]]:
        """What has come, after waiting for so long at most.

        Raises:
            SilenceError: The node has ended.
        """
        if not self._selector.select(max(timeout_s, 0.0)):
            return []
        data = os.read(self._reports, 1 << 20)
        if not data:
            code = self._process.wait(_ENDING_S)
            raise SilenceError(f"the node's process (pid {self.pid}) has ended with exit code {code}")
        *lines, self._begun = (self._begun + data).split(b"\n")
        found = [json.loads(line) for line in lines]
        self.num_running -= sum("end" in report for report in found)
        return found

    def close(self) -> None:
        """End the node, its workers, and what it has in files."""
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None, "it was asked for"
        self._process.stdout.close()
        self._selector.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def ends_of(reports: Sequence[dict[str, Any]]) -> list[End]:
    """Those workers that have ended."""
    return [End(**report["end"]) for report in reports if "end" in report]
