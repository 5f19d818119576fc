"""One worker as the supervisor sees it: a process, what it said, and how it ended."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["WorkerProcess", "signal_name"]


@dataclass
class WorkerProcess:
    """A worker from its start to its end.

    Attributes:
        number: Its place; a worker that replaces it has the same.
        pid: Its process.
        pidfd: Readable when it has ended.
        replaying: It was started later than the others and has not caught up.
        member: Whether it is in the present generation, or is one of those who begin.
        waits: Whether it waits for the next generation.
        in_run: Whether it is inside of an `evenstep.Run`.
        closed: Whether it has left its last one as it should.
        ended: Whether its script has come to its end.
        dismissed: Whether it was told to go.
        given_up: Why it is going to be killed, if it is.
        kill_at: When that will be.
        stopped_since: When it was first seen stopped.
        code: Its exit code, or minus the signal that killed it; None while it lives.
        error: What it said of its own end.
        mistake: That is one sentence to the user, who needs no traceback.
        final: Without it the others cannot go on either.
        hopeless: It would fail again: nobody shall replace it.
        pending: The beginnings of lines, by stream.
    """

    number: int
    pid: int
    pidfd: int
    replaying: bool = False
    member: bool = False
    waits: bool = False
    in_run: bool = False
    closed: bool = False
    ended: bool = False
    dismissed: bool = False
    given_up: str | None = None
    kill_at: float | None = None
    stopped_since: float | None = None
    code: int | None = None
    error: str | None = None
    mistake: bool = False
    final: bool = False
    hopeless: bool = False
    pending: dict[str, bytes] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether it has not been collected yet."""
        return self.code is None

    def describe(self) -> str:
        """Which one."""
        return f"worker {self.number} (pid {self.pid})"

    def describe_end(self) -> str:
        """How it ended, as a sentence."""
        assert self.code is not None, "it has ended"
        how = f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"{self.describe()} {how}"

    def is_stopped(self) -> bool:
        """Whether somebody has stopped the process."""
        with suppress(OSError, IndexError):  # it is just ending
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it started."""
        if self.alive:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)  # not its own group yet; its number is its own until we reap it

    def reap(self) -> None:
        """Collect it when it has ended and, unless all went well, end what it started; its number is free only then."""
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None, "waitid waits"
        if end.si_code != os.CLD_EXITED or end.si_status != 0:
            with suppress(ProcessLookupError, PermissionError):  # no group of its own yet, or another user's by now
                os.killpg(self.pid, signal.SIGKILL)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def signal_name(number: int) -> str:
    """A signal's name, or its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # most real-time signals have no name
