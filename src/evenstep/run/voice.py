"""What a run prints in its own name: our messages and the script's lines, each once, however many workers."""

from evenstep.core.env import Environment
from evenstep.core.events import send
from evenstep.core.output import say, show
from evenstep.exchange.ledger import Ledger

__all__ = ["Voice"]


class Voice:
    """Speaks for a run: through the launcher if there is one, otherwise directly.

    Args:
        env: The environment of the run.
        ledger: The workers' ledger.
        speaks: Whether this process may ever speak for the run; otherwise only others do.
    """

    def __init__(self, env: Environment, ledger: Ledger, *, speaks: bool) -> None:
        self._events_fd, self._ledger, self._speaks = env.events_fd, ledger, speaks
        self._last = (-1, 0)  # after how many operations the last line came, and its number among those there

    def say(self, sentence: str) -> None:
        """Print a message of ours on standard error."""
        if self._events_fd is None:
            say(sentence)
        else:
            send(self._events_fd, {"says": sentence})

    def print(self, text: str) -> None:
        """Print lines of the script on standard output.

        A worker that catches up sends them again, in case the one that was to send them died before: the launcher knows
        by their place in the script which it has shown.
        """
        done, number = self._ledger.done, 0
        if self._last[0] == done:
            number = self._last[1] + 1
        self._last = (done, number)
        if not self._speaks or (self._ledger.group.rank and self._ledger.took_part):
            return
        if self._events_fd is None:
            show(text)
        else:
            send(self._events_fd, {"prints": text, "at": [done, number]})
