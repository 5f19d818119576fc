"""Operations between the leaders of all machines, one for each, by gloo; each ends when a failure is heard of."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, Work

from evenstep.core.errors import EvenstepError, SilenceError
from evenstep.distributed.failures import Failures

__all__ = ["Leaders"]

_FIRST_LOOK_S, _LONGEST_LOOK_S = 2e-5, 0.02


class Leaders:
    """The leaders, as one of them sees them. All must call each operation alike.

    Args:
        group: Their process group; its ranks are numbers of machines.
        count: How many there are.
        others: The names of the others, for errors.
        failures: How this one learns of failures.
        check: Raises the error of this machine's team if it has failed.
    """

    def __init__(self, group: Any, count: int, others: str, failures: Failures, check: Callable[[], None]) -> None:
        self._group, self._count, self._others, self._failures, self._check = group, count, others, failures, check

    def gather(self, mine: Tensor, where: str, timeout_s: float) -> list[Tensor]:
        """What all leaders give, in order; blocks.

        Args:
            mine: What this one gives; of the same size on all.
            where: The operation, in words.
            timeout_s: How long the others may take.

        Raises:
            PeerError: A rank of another machine failed, or its machine is lost.
            SilenceError: A leader did not come in time.
        """
        found = [torch.empty_like(mine) for _ in range(self._count)]
        options = AllgatherOptions()
        options.timeout = self._gloo_timeout(timeout_s)
        self._do(lambda: self._group.allgather([found], [mine], options), where, timeout_s)
        return found

    def broadcast(self, data: Tensor, root: int, where: str, timeout_s: float) -> None:
        """Give everyone what the leader of machine `root` has, in place; otherwise as `gather`."""
        options = BroadcastOptions()
        options.rootRank, options.timeout = root, self._gloo_timeout(timeout_s)
        self._do(lambda: self._group.broadcast([data], options), where, timeout_s)

    def _do(self, start: Callable[[], Work], where: str, timeout_s: float) -> None:
        """Do an operation, and watch for failures meanwhile."""
        deadline, pause_s = time.monotonic() + timeout_s + self._failures.report_s, _FIRST_LOOK_S
        try:
            work = start()
            while not work.is_completed():
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LONGEST_LOOK_S)
                self._check()
                if pause_s == _LONGEST_LOOK_S:
                    self._failures.hear()
                if time.monotonic() > deadline:
                    text = f"one of {self._others} said nothing for {timeout_s:g} s: Timed out in {where}"
                    self._failures.fail(SilenceError, text)
            work.wait()
        except EvenstepError:  # some of ours are RuntimeErrors too
            raise
        except RuntimeError as error:
            self._failures.lose(f"one of {self._others} was lost in {where}: {error}")

    def _gloo_timeout(self, timeout_s: float) -> timedelta:
        """The timeout for gloo: it should end when we give up too, but not before we know why."""
        return timedelta(seconds=timeout_s + 2 * self._failures.report_s)
