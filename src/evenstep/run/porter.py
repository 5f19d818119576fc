"""Answers questions about a run that has no supervisor: under plain `python`, and under torchrun.

`evenstep status` and the page of the run ask through the same socket as they would ask a supervisor. What can be done
without one is done through the same words on the board; the rest is refused with a sentence. A thread waits for
questions, and does nothing else.
"""

import os
import select
import socket
import sys
import threading
from collections import deque
from contextlib import ExitStack, closing
from functools import partial
from time import monotonic
from typing import Any

from evenstep.core.control import Control
from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError
from evenstep.core.events import Event
from evenstep.core.output import say
from evenstep.exchange.board import Asks
from evenstep.exchange.group import Group
from evenstep.native import core
from evenstep.page.answers import answer
from evenstep.page.process import PageProcess
from evenstep.page.seen import Seen

__all__ = ["Porter", "open_page"]

_SAID = 50


def open_page(port: int | None, env: Environment, group: Group, shards: int, *, served: bool) -> "Porter | None":
    """Open a page of this run, if one was asked for; returns what to close. All workers must call this alike.

    Args:
        port: The port; 0: any; None: no page.
        env: The environment of the run: a supervisor serves the page itself.
        group: The workers.
        shards: K.
        served: Whether workers meet at a server that the script names.

    Raises:
        ConfigError: There can be none.
    """
    if port is None:
        return None
    if served:
        raise ConfigError(
            "Run(page=...) with Run(server=...): its steps are shown on the server's own page; open that one"
        )
    if env.supervised:
        group.tell({"page": port})
        return None
    if group.num_machines > 1:
        raise ConfigError(
            f"Run(page=...) under torchrun on {group.num_machines} machines, expected one: start the run with "
            "`evenstep run --page --listen HOST:PORT` to see several"
        )
    return Porter(port, group, shards) if group.rank == 0 else None


class Porter:
    """Answers for a run, and has its page served, until it is closed.

    Args:
        port: The port of the page; 0: any.
        group: The workers of the run; this one is their first.
        shards: K.

    Raises:
        ConfigError: There can be no page, or another run of this process has one.
    """

    def __init__(self, port: int, group: Group, shards: int) -> None:
        self._group, self._shards, self._seen, self._pid = group, shards, Seen(), os.getpid()
        self._said: deque[tuple[float, str]] = deque(maxlen=_SAID)
        self._asked = group.board.asked()[Asks.CHECKPOINT]
        with ExitStack() as opened:
            try:
                self._control = opened.enter_context(closing(Control()))
            except OSError as error:
                raise ConfigError(
                    f"Run(page=...): this process already has a page of another run ({error.strerror}); close that run "
                    "first, or give only one of them a page"
                ) from error
            page = opened.enter_context(closing(PageProcess(port, f"Run(page={port})")))
            page.spawn(group.segment)
            before, group.tell = group.tell, self._hear
            opened.callback(setattr, group, "tell", before)
            self._over, over = (opened.enter_context(end) for end in socket.socketpair())
            self._thread = threading.Thread(target=self._answer, args=(over,), name="evenstep-porter", daemon=True)
            self._thread.start()
            self._opened = opened.pop_all()
        say(page.invitation)

    def close(self) -> None:
        """Stop answering, and end the page. In a forked copy of this process, do nothing."""
        if os.getpid() == self._pid:
            self._over.send(b".")
            self._thread.join()
            self._opened.close()

    def _answer(self, over: socket.socket) -> None:
        while over not in select.select([over, self._control.socket], [], [])[0]:
            self._control.answer(partial(answer, self))

    def _hear(self, event: Event) -> None:
        """Handle what the run would tell a supervisor."""
        if "saved" in event:
            self._seen.saved(event["saved"])
        if "fingerprint now" in event:
            self._seen.fingerprint(*event["fingerprint now"])
        for kind in ("says", "slow"):
            if kind in event:
                self._said.append((monotonic(), event[kind]))
        if "stopped" in event:
            where = event["stopped"]["checkpoint"]
            saved = f"its checkpoint is {where}" if where else "nothing was saved"
            say(f"stopped from its page after step {event['stopped']['step']}; {saved}")

    def scale(self, number: int) -> str:
        """See `Asked`."""
        raise ConfigError(f"{number} workers, but they come and go only under `evenstep run`; start the run with it")

    def ask_for_checkpoint(self) -> None:
        """See `Asked`."""
        self._asked += 1
        self._group.board.ask(Asks.CHECKPOINT, self._asked)

    def ask_for_fingerprint(self) -> None:
        """See `Asked`."""
        self._group.board.ask_fingerprint()

    def stop(self) -> None:
        """See `Asked`."""
        self._group.board.ask(Asks.STOP, 1)
        self._said.append((monotonic(), "stopping after this step"))

    def status(self) -> dict[str, Any]:
        """See `Asked`."""
        group = self._group
        workers = [
            {
                "worker": worker,
                "pid": core.pid(group.segment.base, worker),
                "member": True,
                "machine": 0,
                **group.board.row(worker),
            }
            for worker in group.members
        ]
        return {
            "generation": group.generation,
            "operations": group.board.committed,
            "wanted": len(workers),
            "restarts": 0,
            "num_shards": self._shards,
            "script": sys.argv[0] or "python",
            "buttons": ["checkpoint", "fingerprint", "stop"],
            **self._seen.described(self._said),
            "machines": [{"machine": 0, "name": socket.gethostname(), "workers": list(group.members)}],
            "workers": workers,
        }
