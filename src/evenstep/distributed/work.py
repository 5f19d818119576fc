"""What torch gets for an operation that it started: something to wait for."""

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import Work
from torch.autograd import (  # type: ignore[attr-defined]  # torch has no public way to tell sizes
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)
from torch.futures import Future

from evenstep.core.errors import SilenceError
from evenstep.core.identity import check_not_a_copy

__all__ = ["DONE", "NO_TIMEOUT", "PendingWork", "begin_record", "end_record", "is_recording"]

NO_TIMEOUT = timedelta(0)
"""What torch passes when a wait may take as long as the operation."""


is_recording: Callable[[], bool] = _profiler_enabled
"""Whether a profiler is recording operations."""


def begin_record(name: str, inputs: Sequence[Tensor]) -> Any:
    """Let a profiler, if there is one, know that an operation begins, as torch's own backends do."""
    return _record_function_with_args_enter(f"evenstep:{name}", *inputs) if is_recording() else None


def end_record(record: Any) -> None:
    """End a record. Called in another thread than it began in, which tells the profiler that it is asynchronous."""
    if record is not None:
        _record_function_with_args_exit(record)


class DoneWork(Work):
    """An operation that was done before the call returned. One object serves all of them."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True


DONE = DoneWork()


class PendingWork(Work):
    """An operation that another thread completes.

    Args:
        name: What it is, for errors.
        result: The tensors that it fills: what its future holds.
        record: What a profiler is told of it; see `begin_record`.
    """

    def __init__(self, name: str, result: list[Any], record: Any = None) -> None:
        super().__init__()
        self.name = name
        self._record = record
        self._result = result
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: Future[Any] | None = None
        self._source = -1

    def complete(self, error: BaseException | None = None, source: int = -1) -> None:
        """Say that it is over: well, or with an error."""
        record, self._record = self._record, None
        end_record(record)
        with self._lock:
            self._error, self._source = error, source
            self._done.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def _settle(self, future: "Future[Any]") -> None:
        if self._error is None:
            future.set_result(self._result)
        else:
            future.set_exception(self._error)

    def run(self, job: Callable[[], None], over: Callable[[], None]) -> None:
        """Run the job, call `over`, and only then tell the waiting threads how it ended."""
        found: BaseException | None = None
        try:
            job()
        except BaseException as error:  # noqa: BLE001  # the border of a thread: the waiting caller gets it
            found = error
        over()
        self.complete(found)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is over, but no longer than `timeout` if one is given.

        Raises:
            SilenceError: It is not over after the timeout; the operation goes on.
            ConfigError: This process is a copy of the rank that started it, and it was not over then.
            EvenstepError: It failed; the same error for every waiting caller.
        """
        if not self._done.is_set():
            check_not_a_copy(self._pid, "a rank of torch.distributed")  # a copy lacks the thread that would complete it
        seconds = timeout.total_seconds()
        if not self._done.wait(seconds if seconds > 0 else None):
            raise SilenceError(f"{self.name} is not over after wait(timeout={seconds:g} s), and goes on; wait again")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The error that it ended with, if it did."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that it fills."""
        return self._result

    def source_rank(self) -> int:
        """Who sent the message that was received."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> "Future[Any]":
        """A future that holds the tensors when it is over."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future()
            over = self._done.is_set()
        if over:
            self._settle(future)
        return future
