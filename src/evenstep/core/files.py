"""Files in directories that others can write to: read only regular files, up to a limit; never write through a link."""

import os
import stat
from io import BufferedReader
from pathlib import Path

__all__ = ["open_regular", "read_regular", "sync", "write_new"]


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. A pipe would block and a device may do anything, so neither is touched.

    Raises:
        OSError: It is missing, or not a regular file.
    """
    _check(path, os.stat(path))
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    try:
        _check(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a file.

    Raises:
        OSError: It is missing, not a regular file, or longer than that.
    """
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(f"it has more than {most_bytes} bytes")
    return data


def write_new(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk. Whatever has its name, such as a dead writer's file, is replaced.

    Nothing is written into what was there: a link would lead elsewhere, a pipe would block.

    Raises:
        OSError: It cannot be written.
    """
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(data)
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the listing of a directory, is on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is not a regular file")
