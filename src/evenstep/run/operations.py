"""What the workers of a run do alike: a failure on one of them reaches all."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from evenstep.core.errors import BeginsAgain, ConfigError, Dismissed, EvenstepError, PeerError, Stopped
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Ledger, Operation

__all__ = ["RunOperations"]

T = TypeVar("T")


class RunOperations:
    """The operations of one worker's run.

    Args:
        ledger: The workers' ledger.
        worker: Which of them this is.

    Attributes:
        version: How many steps have been committed, for messages.
        check_untouched: Raises if user code has changed what only operations may change.
        closed: Whether the run is over.
    """

    def __init__(self, ledger: Ledger, worker: int) -> None:
        self._ledger, self._worker = ledger, worker
        self.version: Callable[[], int] = lambda: 0
        self.check_untouched: Callable[[], None] = lambda: None
        self.closed = False
        self._failed: str | None = None

    def perform(self, kind: str, attempt: Callable[[], Entry], adopt: Callable[[Entry, bool], T]) -> T:
        """Do an operation on all workers; see `Ledger.perform`."""
        with self.alike():
            self.check_untouched()
            return self._ledger.perform(Operation(kind, self.version()), attempt, adopt)

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Something that all workers do alike; if this one fails inside, the others learn why.

        Raises:
            ConfigError: The run is over, or this is a copy of the process that runs it.
        """
        self.check_open()
        try:
            yield
        except BaseException:
            self.tell_others()
            raise

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step, which all workers do alike. Where others do it again if this one fails, it is the last thing done.

        Raises:
            EvenstepError: The script has caught the error of an earlier step, and goes on.
        """
        try:
            with self.alike():
                yield
        except Exception as error:
            if self._ledger.group.elastic and self._failed is None and not self._is_of_another(error):
                self._failed = (
                    f"the script caught an error of step {self.version()} ({type(error).__name__}: {error!s:.200}) and "
                    "goes on, but the other workers do that step again: let it end the worker, or catch it inside the "
                    "step function and return a loss there"
                )
            raise

    def check_open(self) -> None:
        """Check that the run is open, and that this is its process.

        Raises:
            ConfigError: It is closed, or this is a forked copy of its process.
            EvenstepError: The script has caught the error of an earlier step.
        """
        self._ledger.group.check_process()
        if self._failed is not None:
            raise EvenstepError(self._failed)  # ends this worker, not the run: the others may do better
        if self.closed:
            raise ConfigError(
                "this run is closed, and its models and optimizers are ordinary ones again; do what needs it inside "
                "`with evenstep.Run(...) as run`, or make another run"
            )

    def tell_others(self) -> None:
        """Tell the others why this worker stops, unless it stops because of another or was told to."""
        error = sys.exc_info()[1]
        if error is not None and not self._is_of_another(error):
            where = f"worker {self._worker} failed at step {self.version()}:\n"
            self._ledger.group.fail(where + "".join(traceback.format_exception(error)))

    @staticmethod
    def _is_of_another(error: BaseException) -> bool:
        """Whether a worker stops because of another, or was told to."""
        return isinstance(error, PeerError | Stopped | Dismissed | BeginsAgain)
