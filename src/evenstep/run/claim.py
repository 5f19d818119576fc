"""A directory holds the checkpoints of one run at a time: two would remove each other's.

Every worker of the run holds a shared lock on one file in the directory, which says whose it is; the first to come
briefly holds it exclusively, to write that down. The kernel releases it when the last of them has ended.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from evenstep.core.errors import CheckpointError
from evenstep.core.output import say

__all__ = ["Claim"]

_NAME = "evenstep.lock"
_PATIENCE_S = 10.0  # for what a run that has ended left behind, such as loader processes, to end too


class Claim:
    """The claim of one worker to a directory.

    Args:
        directory: The directory.
        run: Which run; the same on all its workers.
    """

    def __init__(self, directory: Path, run: str) -> None:
        self._directory, self._run = directory, run
        self._fd: int | None = None

    def take(self) -> None:
        """Claim the directory for this run. Where files cannot be locked, there is no claim.

        Raises:
            CheckpointError: Another run has it.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fd = os.open(self._directory / _NAME, flags, 0o666)
            self._lock(self._fd)
        except OSError as error:
            self.release()
            say(f"{self._directory} cannot be locked against other runs: {error}")
        except BaseException:
            self.release()
            raise

    def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            if _try(fd, fcntl.LOCK_EX):
                mine = {"run": self._run, "pid": os.getpid(), "host": socket.gethostname()}
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(mine).encode(), 0)
                if _try(fd, fcntl.LOCK_SH):
                    return
            elif _try(fd, fcntl.LOCK_SH):
                holder = _read(fd)
                if holder["run"] == self._run:
                    return
                fcntl.flock(fd, fcntl.LOCK_UN)
                if _lives(holder) or time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{self._directory} is taken: the run of process {holder['pid']} on {holder['host']} writes "
                        "its checkpoints there; give each run a directory of its own"
                    )
            time.sleep(0.02)

    def release(self) -> None:
        """Release it."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # also on behalf of forked copies that are still alive
            os.close(self._fd)
            self._fd = None


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(fd: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(fd, 4096, 0))
        return {key: found[key] for key in ("run", "pid", "host")}
    except (ValueError, TypeError, KeyError):  # not written by us, so there is no holder that we know
        return {"run": None, "pid": "?", "host": "?"}


def _lives(holder: dict[str, object]) -> bool:
    """Whether the process that claimed the file is alive; assumed of one on another machine."""
    return holder["host"] != socket.gethostname() or os.path.exists(f"/proc/{holder['pid']}")
