"""What the launcher shows of its workers: their numbered lines, one progress display, errors, the fingerprint."""

import codecs
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from io import FileIO, TextIOWrapper
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import TextIO

from evenstep.core.errors import ConfigError
from evenstep.core.events import Event
from evenstep.core.output import unheard
from evenstep.run.progress import Display, Progress

__all__ = ["Console"]

_SAID = 50

_LENIENT = "evenstep: as it is, or escaped"


class Console:
    """Standard output and error of the launcher, and the logs of the workers. Use it as a context manager.

    A worker that replaces another runs the script from its beginning, and so prints again what has been shown: as many
    lines as its place has shown are left out. In a new place, everything is left out until the worker has caught up.

    Args:
        log_dir: A directory for a log of each worker's output, if wanted.
        num_workers: How many logs to open at first.
        group: The number of these workers' group, if there are several.
        report: Takes progress, fingerprint and the error that ends the run, if another process shows them.

    Attributes:
        said: The last sentences of our own, each with its time.

    Raises:
        ConfigError: A log cannot be created.
    """

    def __init__(
        self,
        log_dir: Path | None,
        num_workers: int,
        group: int | None = None,
        report: Callable[[Event], None] | None = None,
    ) -> None:
        self._log_dir, self._report = log_dir, report
        self._prefix, self._name = ("", "") if group is None else (f"{group}.", f"group {group}: ")
        self._stack = ExitStack()
        self._logs: dict[int, FileIO] = {}
        self._unlogged: set[int] = set()  # workers whose log could not be written
        self._display = Display()
        self._shown = dict.fromkeys(range(num_workers), 0)  # lines of standard output, by place
        self._hidden: dict[int, int] = {}  # how many lines are still left out, by place
        self._fingerprint: tuple[int, str] | None = None
        self._printed: set[tuple[int, int]] = set()  # places in the script
        self._warned: set[str] = set()
        self.said: deque[tuple[float, str]] = deque(maxlen=_SAID)
        if log_dir is not None:
            for number in range(num_workers):
                self._logs[number] = self._open(log_dir, number)

    def __enter__(self) -> "Console":
        for stream in (sys.stdout, sys.stderr):
            self._stack.enter_context(_bytes_as_they_are(stream))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()
        self._stack.close()

    def _open(self, directory: Path, number: int) -> FileIO:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"worker-{self._prefix}{number}.log"
            return self._stack.enter_context(path.open("wb", buffering=0))
        except OSError as error:
            raise ConfigError(
                f"--log-dir {directory}: cannot create {error.filename or directory}: {error.strerror}; name another "
                "directory"
            ) from error

    def begin(self, number: int, *, again: bool) -> None:
        """A worker starts in a place, for the first time or in the middle of a run."""
        if self._log_dir is not None and number not in self._logs:
            self._logs[number] = self._open(self._log_dir, number)
        self._hidden[number] = self._shown.get(number, sys.maxsize) if again else 0

    def caught_up(self, number: int) -> None:
        """A worker is where the others are."""
        if number not in self._shown:
            self._shown[number] = self._hidden[number] = 0

    def show(self, number: int, lines: Sequence[bytes], *, is_error: bool) -> None:
        """Show whole lines of a worker."""
        stream = sys.stderr if is_error else sys.stdout
        if not is_error:
            hidden = min(self._hidden[number], len(lines))
            self._hidden[number] -= hidden
            lines = lines[hidden:]
            if number in self._shown:
                self._shown[number] += len(lines)
        if not lines:
            return
        self._log(number, b"\n".join(lines))
        # with `_bytes_as_they_are`, bytes that are not text in the stream's encoding come out unchanged
        texts = (line.decode(stream.encoding or "utf-8", "surrogateescape") for line in lines)
        self._display.write("\n".join(f"[{self._prefix}{number}] {text}" for text in texts), stream)

    def print(self, number: int, place: tuple[int, int], text: str) -> None:
        """Show a line that the script prints for the whole run, unless it was shown before from that place."""
        if place not in self._printed:
            self._printed.add(place)
            self._log(number, text.encode(errors="backslashreplace"))
            self._display.write(text, sys.stdout)

    def warn(self, number: int, text: str) -> None:
        """Show a warning, unless another worker gave the same."""
        self._log(number, text.rstrip().encode(errors="backslashreplace"))
        if text not in self._warned:
            self._warned.add(text)
            self._display.write(f"[{self._prefix}{number}] {text.rstrip()}", sys.stderr)

    def pass_on(self, lines: Sequence[bytes], *, is_error: bool) -> None:
        """Show whole lines of a group's supervisor unchanged."""
        stream = sys.stderr if is_error else sys.stdout
        for line in lines:
            self._display.write(line.decode(stream.encoding or "utf-8", "surrogateescape"), stream)

    def _log(self, number: int, data: bytes) -> None:
        rest = memoryview(data + b"\n")
        try:
            while number in self._logs and rest:
                rest = rest[self._logs[number].write(rest) :]
        except OSError as error:
            if number not in self._unlogged:
                self._unlogged.add(number)
                self.say(f"the log of worker {self._prefix}{number} cannot be written: {error.strerror}")

    def log_error(self, number: int, text: str) -> None:
        """Note in a worker's log why it failed."""
        self._log(number, text.rstrip().encode(errors="backslashreplace"))

    def show_error(self, text: str | None) -> None:
        """Show a worker's error in full."""
        if text:
            self._display.write(text.rstrip(), sys.stderr)

    def show_failure(self, text: str | None) -> None:
        """Show the error that ended the run in full, unless another process shows it."""
        if text and self._report is not None:
            self._report({"error": text.rstrip()})
        else:
            self.show_error(text)

    def say(self, sentence: str, *, secret: bool = False) -> None:
        """Show a sentence of our own.

        Args:
            sentence: The sentence.
            secret: Whether it is only for the user who started the run; it is then not kept in `said`.
        """
        if not secret:
            self.said.append((monotonic(), sentence))
        self._display.write(f"evenstep: {self._name}{sentence}", sys.stderr)

    def progress(self, progress: Progress) -> None:
        """Show how far the run is."""
        if self._report is not None:
            self._report({"progress": asdict(progress)})
        else:
            self._display.show(progress)

    def note_fingerprint(self, operation: int, fingerprint: str) -> None:
        """Keep the fingerprint of a run, which every worker reports; show that of an earlier run of the script."""
        if self._fingerprint is None or operation > self._fingerprint[0]:
            self.show_fingerprint()
            self._fingerprint = (operation, fingerprint)

    def show_fingerprint(self) -> None:
        """Show the fingerprint of the last run, if it finished."""
        if self._fingerprint is not None and self._report is not None:
            self._report({"fingerprint": self._fingerprint[1]})
        elif self._fingerprint is not None:
            self._display.write(f"fingerprint {self._fingerprint[1]}", sys.stdout)

    def end_progress(self) -> None:
        """Leave the progress display as it is: what comes now is last."""
        self._display.close()
        with unheard(sys.stdout):
            sys.stdout.flush()


@contextmanager
def _bytes_as_they_are(stream: TextIO) -> Iterator[None]:
    """Let the stream write undecodable bytes, which workers may print, unchanged, and never fail at any text."""
    if not isinstance(stream, TextIOWrapper):
        yield
        return
    before = stream.errors
    codecs.register_error(_LENIENT, _encoded)
    stream.reconfigure(errors=_LENIENT)
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


def _encoded(error: UnicodeError) -> tuple[bytes, int]:
    """What a stream writes for text that its encoding lacks: bytes that were not text, or else an escape sequence."""
    assert isinstance(error, UnicodeEncodeError), "only encoding uses this handler"
    found = error.object[error.start : error.end]
    return b"".join(
        bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else c.encode("ascii", "backslashreplace") for c in found
    ), error.end
