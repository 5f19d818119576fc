"""Messages between ranks of different machines, through gloo, which does not know what a rank is."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from torch import Tensor
from torch._C._distributed_c10d import Work

from evenstep.distributed.work import NO_TIMEOUT, end_record

__all__ = ["DirectWork"]


class DirectWork(Work):
    """A message that gloo moves.

    Args:
        work: What gloo gave.
        tensor: What is sent, or received into; kept alive until the message is done.
        timeout_s: How long to wait if the user does not say.
        record: What a profiler is told of it.
        fail: Called with gloo's error and the seconds that were waited; raises one of ours.
    """

    def __init__(
        self,
        work: Work,
        tensor: Tensor,
        timeout_s: float,
        record: Any,
        fail: Callable[[RuntimeError, float], NoReturn],
    ) -> None:
        super().__init__()
        self._work, self._tensor, self._timeout_s, self._fail = work, tensor, timeout_s, fail
        self._record = record

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is done, but no longer than `timeout`, or by default the group's timeout.

        Raises:
            PeerError: The other rank, or the connection to it, is lost.
            SilenceError: It did not come in time.
        """
        seconds = timeout.total_seconds() or self._timeout_s
        try:
            return bool(self._work.wait(timedelta(seconds=seconds)))
        except RuntimeError as error:
            self._fail(error, seconds)
        finally:
            record, self._record = self._record, None
            end_record(record)

    def is_completed(self) -> bool:
        """Whether it is known to be done: gloo finds out in `wait`."""
        return bool(self._work.is_completed())

    def result(self) -> list[Tensor]:
        """The tensor."""
        return [self._tensor]

    def source_rank(self) -> int:
        """Who sent the message that was received."""
        return int(self._work._source_rank())

    _source_rank = source_rank
