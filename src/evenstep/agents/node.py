"""The warm process of a node: imports torch once, forks workers when it is told to, and says what they do.

Orders come through standard input and reports go to standard output, as JSON lines, from and to the agent that has
started it. It has one thread. When its input ends, its agent is gone: it ends its workers, removes the agent's folder
(its argument), and ends itself.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from platform import python_version
from typing import Any

import torch
import torch._inductor.config  # a second that every worker would spend in its first step
from torch._C._distributed_c10d import TCPStore

import evenstep
from evenstep.agents.orders import Order
from evenstep.core import env
from evenstep.core.children import Child, Children
from evenstep.core.events import Event, send
from evenstep.launch.worker import run_worker
from evenstep.run.run import Run

__all__ = ["Run", "main"]  # the first so that every worker has it at once

_GRACE_S = 10.0  # how long the others have to end by themselves once a worker has failed
_SHOWN = ("progress", "prints", "says", "slow", "warning", "fingerprint")  # events that are somebody else's business


class _Node:
    """Workers of one attempt after the other."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._children = Children(self._heard, self._ended)
        self._workers: dict[int, tuple[int, Child]] = {}  # by process
        self._errors: dict[int, str] = {}
        self._store: Child | None = None
        self._deadline: float | None = None
        self._begun = b""
        self.over = False

    def serve(self) -> None:
        """Go on until the input ends."""
        os.set_blocking(0, False)
        with self._children as children:
            children.watch(sys.stdin, self._read)
            while not self.over:
                children.turn(0.25)
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self._deadline = None
                    self._end_all()

    def _read(self) -> None:
        data = os.read(0, 65536)
        *lines, self._begun = (self._begun + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "host" in order:
                self._host()
            elif "start" in order:
                self._start(Order.of(order["start"]))
            else:
                self._end_all()
        self.over = not data

    def _host(self) -> None:
        """Start the store through which the workers of the next attempt find each other, in a process of its own."""
        if self._store is not None:
            self._store.signal(signal.SIGKILL)
        self._store = self._children.start(lambda pipes: _host_store(pipes["events"]), ("events",))

    def _start(self, order: Order) -> None:
        self._errors.clear()
        self._deadline = None
        script = Path(order.script) if order.script.endswith(".py") else order.script
        for worker in order.workers:

            def work(pipes: Mapping[str, int], worker: int = worker) -> int:
                variables = env.rank_variables(
                    worker,
                    order.num_workers,
                    (order.host, order.port),
                    pipes["events"],
                    shards=order.shards,
                    timeout_s=order.step_timeout_s,
                    resume=order.resume,
                )
                return run_worker(script, order.args, variables)

            child = self._children.start(work, ("out", "err", "events"))
            self._workers[child.pid] = (worker, child)

    def _heard(self, child: Child, kind: str, lines: Sequence[bytes]) -> None:
        if child is self._store:
            send(self._out, json.loads(lines[0]))
        if child.pid not in self._workers:  # what a worker that has ended had started may still write
            return
        worker = self._workers[child.pid][0]
        for line in lines:
            if kind == "events":
                self._note(worker, json.loads(line))
            else:
                send(self._out, {"worker": worker, kind: line.decode(errors="replace")})

    def _note(self, worker: int, event: Event) -> None:
        if "error" in event:
            self._errors[worker] = event["error"]
        for name in _SHOWN:
            if name in event:
                send(self._out, {"worker": worker, "event": event})

    def _ended(self, child: Child) -> None:
        if child.pid not in self._workers:
            return
        worker, _ = self._workers.pop(child.pid)
        how = f"worker {worker} (pid {child.pid}) {child.describe_end()}"
        end: dict[str, Any] = {"worker": worker, "code": child.code, "how": how, "error": self._errors.get(worker)}
        send(self._out, {"end": end})
        if child.code and self._deadline is None:
            self._deadline = time.monotonic() + _GRACE_S

    def _end_all(self) -> None:
        for _, child in self._workers.values():
            child.signal(signal.SIGKILL)


def _host_store(events_fd: int) -> int:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    send(events_fd, {"port": store.port})
    while True:
        signal.pause()


def main() -> int:
    """Be a node until the input ends; returns the exit code."""
    out = os.dup(1)
    os.dup2(2, 1)  # what anybody prints by mistake is no report
    facts = {
        "node": os.uname().nodename,
        "python": python_version(),
        "torch": str(torch.__version__),
        "evenstep": evenstep.__version__,
    }
    send(out, {"ready": facts, "pid": os.getpid()})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what the agent's terminal sends is the agent's business
    _Node(out).serve()
    shutil.rmtree(sys.argv[1], ignore_errors=True)  # an agent that was killed could not do it
    return 0


if __name__ == "__main__":
    sys.exit(main())
