"""What the caller of a run on a cluster sees of it: progress, output, and how it ends."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from evenstep.agents.shipping import unship
from evenstep.core.errors import (
    CheckpointError,
    ConfigError,
    EvenstepError,
    SilenceError,
    Stopped,
    UnsupportedError,
    WrongError,
)
from evenstep.core.output import say
from evenstep.launch.trace_file import TraceFile
from evenstep.run.progress import Display, Progress

__all__ = ["RunView", "ScriptError"]

_PREFIX = "evenstep: "  # of a sentence of ours
_BEFORE_STACK, _LONGEST_STACK = "; its stack:", 100  # of a worker that is given up
_MISTAKES = {error.exit_code: error for error in (ConfigError, UnsupportedError, CheckpointError, WrongError)}
_INTERRUPTED = (Stopped.exit_code, 128 + signal.SIGINT)


class ScriptError(EvenstepError):
    """The script or function failed on a worker. The message is its traceback."""


class RunView:
    """Shows what a head reports.

    Args:
        on_progress: Called with each progress report.
        quiet: Print nothing.
    """

    def __init__(self, on_progress: Callable[[Progress], None] | None, *, quiet: bool) -> None:
        self._trace: Callable[[Sequence[str]], None] | None = None
        self._on_progress, self._quiet, self._display = on_progress, quiet, Display()
        self._fingerprint: str | None = None
        self._error: str | None = None
        self._mistake: str | None = None
        self._last: str | None = None
        self._stack: list[str] = []  # of the last worker that was given up, and what comes before it

    @contextmanager
    def tracing(self, path: str | Path | None, work: Any) -> Iterator[None]:
        """Write the events of a trace to a file inside this, if there is to be one.

        Args:
            path: The file.
            work: The function or script that is traced.

        Raises:
            ConfigError: The file cannot be written.
        """
        if path is None:
            yield
            return
        with closing(TraceFile(Path(path), str(getattr(work, "__name__", work)), say)) as file:
            self._trace = file.append
            yield

    def say(self, sentence: str) -> None:
        """Show a sentence of our own."""
        if not self._quiet:
            say(sentence)

    def warn(self, sentence: str) -> None:
        """Show a sentence that the user needs in order to act, even if what workers print is not shown."""
        say(sentence)

    def hear(self, report: dict[str, Any]) -> None:
        """Show one report of the head."""
        event = report.get("event", {})
        self._error = event.get("error", self._error)
        self._mistake = event.get("mistake", self._mistake)
        self._fingerprint = event.get("fingerprint", self._fingerprint)
        if "err" in report:
            self._keep(report["err"])
        if "progress" in event and self._on_progress is not None:
            self._on_progress(Progress(**event["progress"]))
        if "trace" in event and self._trace is not None:
            self._trace(event["trace"])
        if not self._quiet:
            self._show(report, event)

    def _keep(self, line: str) -> None:
        """Keep what may have to be said at the end."""
        self._last = line
        if line.endswith(_BEFORE_STACK):
            self._stack = [line.removeprefix(_PREFIX)]
        elif self._stack and not line.startswith(_PREFIX) and len(self._stack) < _LONGEST_STACK:
            self._stack.append(line)

    def _show(self, report: dict[str, Any], event: dict[str, Any]) -> None:
        if "progress" in event:
            self._display.show(Progress(**event["progress"]))
        for kind, stream in (("out", sys.stdout), ("err", sys.stderr)):
            if kind in report:
                self._display.write(report[kind], stream)

    def end(self, code: int, result: bytes | None) -> Any:
        """The result of the function, once the head has ended.

        Raises:
            ScriptError: The script failed, with the exit code of the run.
            ConfigError: The head could not start, or the script has made a mistake that one sentence explains; this, or
                another of our errors, as where the script runs by itself.
            KeyboardInterrupt: The run was stopped by the user; its argument is the exit code.
            SilenceError: The run failed for another reason; it has the exit code of the run.
        """
        self._display.close()
        if code in _INTERRUPTED:
            raise KeyboardInterrupt(code)
        if self._mistake is not None:
            raise ConfigError(self._mistake)
        if self._error is not None:
            raise _error_of(self._error, code)
        if code:
            said, how = (self._last or "the run has failed").removeprefix(_PREFIX), f"exit code {code}"
            error = SilenceError(said if said.endswith(how) else f"{said} ({how})")
            error.exit_code = code if code > 0 else error.exit_code
            error.was_shown = self._last is not None and not self._quiet
            if self._quiet and self._stack:
                error.add_note("\n".join(self._stack))
            raise error
        if self._fingerprint is not None and not self._quiet:
            self._display.write(f"fingerprint {self._fingerprint}", sys.stdout)
        return None if result is None else unship(result)


def _error_of(text: str, code: int) -> EvenstepError:
    """The error that ended a worker, of which there is a traceback or a sentence."""
    if text.startswith(_PREFIX) and code in _MISTAKES:
        return _MISTAKES[code](text.removeprefix(_PREFIX))
    error = ScriptError(text.removeprefix(_PREFIX))
    error.exit_code = code if code > 0 else error.exit_code
    return error
