"""How a failure of one rank reaches the ranks of all machines: inside a machine by its team, between them by a word.

Every wait here has a bound: torch's store stops answering when the process that hosts it has stopped.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from evenstep.core.errors import EvenstepError, MismatchError, PeerError, SilenceError
from evenstep.distributed.errors import kind_of
from evenstep.distributed.team import Team

__all__ = ["Failures", "Word"]

_KEY = "evenstep/failed"
_TELLING_S = 1.0
_LOOK_S = 0.02


class Word:
    """The first failure of a group, left in torch's store for the other machines. Nothing here blocks for long."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._asking: threading.Thread | None = None
        self._found: str | None = None
        self.lost = False
        """Whether the store is gone with the process that hosted it."""

    def leave(self, text: str) -> None:
        """Say why the group has failed, if nobody has yet."""
        self._in_a_thread(lambda: self._store.compare_set(_KEY, "", text)).join(_TELLING_S)

    def found(self) -> str | None:
        """The failure that some rank reported, if known yet; the store is asked again in the background."""
        if self._found is None and (self._asking is None or not self._asking.is_alive()):
            self._asking = self._in_a_thread(self._ask)
        return self._found

    def _ask(self) -> None:
        if self._store.check([_KEY]):
            self._found = self._store.get(_KEY).decode()

    def _in_a_thread(self, ask: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                ask()
            except RuntimeError:
                self.lost = True

        thread = threading.Thread(target=run, name="evenstep-word", daemon=True)
        thread.start()
        return thread


class Failures:
    """The failure of a group that spans machines; only the first counts, and everyone raises the same.

    Args:
        word: Where machines leave word for each other.
        team: The ranks of this machine.

    Attributes:
        report_s: How long the machine of a rank that failed may take to say so, beyond the timeout.
    """

    report_s = 2.0

    def __init__(self, word: Word, team: Team) -> None:
        self._word, self._team = word, team

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Leave word for the other machines of an error that is raised inside."""
        try:
            yield
        except EvenstepError as error:
            self._word.leave(f"{kind_of(error).__name__}\n{error}")
            raise

    def fail(self, kind: type[EvenstepError], text: str) -> NoReturn:
        """Fail on this machine, and raise what everyone there gets."""
        self._team.fail(kind, self._team.index, text)
        self._team.raise_failure()

    def hear(self) -> None:
        """Fail here too if another machine has left word, as far as is known yet."""
        found = self._word.found()
        if found is not None:
            kind, _, text = found.partition("\n")
            self.fail({"MismatchError": MismatchError, "SilenceError": SilenceError}.get(kind, PeerError), text)

    def lose(self, text: str) -> NoReturn:
        """Fail because a connection broke; if another machine soon says why, with that."""
        deadline = time.monotonic() + self.report_s
        while time.monotonic() < deadline and not self._word.lost:
            self.hear()
            time.sleep(_LOOK_S)
        self.fail(PeerError, text)
