"""The operations of a group, in the order in which they were started."""

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Work

from evenstep.core.identity import check_not_a_copy
from evenstep.distributed.work import DONE, PendingWork
from evenstep.native import core

__all__ = ["Jobs"]

Job = Callable[[], None]


class Jobs:
    """Runs jobs one after another: on the caller's thread if it would wait anyway, otherwise on a thread of its own.

    Args:
        name: The name of the thread.
        in_background: Called before (True) and after (False) each job that the thread does.

    Attributes:
        turn: Held while a job runs; a caller that takes it runs its job at once if no other is open.
    """

    def __init__(self, name: str, in_background: Callable[[bool], None]) -> None:
        self._name = name
        self._pid = os.getpid()
        self._in_background = in_background
        self._lock = threading.Lock()
        self.turn = core.Turn()
        self._jobs: queue.SimpleQueue[tuple[PendingWork, Job] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, name: str, job: Job, result: list[Any], asynchronous: bool, record: Any = None) -> Work:
        """Start a job.

        Args:
            name: What it is, for errors.
            job: What to do.
            result: The tensors that it fills.
            asynchronous: If not, the job runs before this returns if no other is open.
            record: What a profiler is told of it, if there is one; then the thread always runs it.

        Raises:
            EvenstepError: What the job raised, if it ran here.
        """
        self.check_process()
        if not asynchronous and record is None and self.turn.take():
            try:
                job()
            finally:
                self.turn.leave()
            return DONE
        with self._lock:
            self.turn.opened()
            work = PendingWork(name, result, record)
            self._jobs.put((work, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        return work

    def check_process(self) -> None:
        """Check that this process is the rank that made these operations.

        Raises:
            ConfigError: It is a forked copy of it.
        """
        check_not_a_copy(self._pid, "a rank of torch.distributed")

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            work, job = item
            self.turn.wait()
            self._in_background(True)
            work.run(job, self.turn.over)
            self._in_background(False)
            self.turn.leave()
            del item, work, job  # otherwise the tensors would live until the next job comes

    def close(self) -> None:
        """End the thread when all started jobs are done."""
        if os.getpid() != self._pid:  # a forked copy has no thread, and its lock may be held forever
            return
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if thread is not threading.current_thread():
                thread.join()
