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
    """Runs jobs one after the other: on the caller's thread where it would wait anyway, else on a thread of its own.

    Args:
        name: The name of the thread.
        in_background: Told before and after each job that the thread does.

    Attributes:
        turn: Held while a job is done; who takes it does one here and now, if no other is open.
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
            asynchronous: If not, this may do the job before it returns, and does so if no other is open.
            record: What a profiler is told of it, if there is one; then the thread does it in any case.

        Raises:
            EvenstepError: What the job raised, if it was done here.
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
        """See that this process is the rank whose operations these are.

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
            del item, work, job  # the tensors must not live until the next job comes

    def close(self) -> None:
        """End the thread when the jobs that were started are over."""
        if os.getpid() != self._pid:  # a copy has no thread, and maybe a lock that it held
            return
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if thread is not threading.current_thread():
                thread.join()
