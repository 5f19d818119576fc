"""What whoever has started a run on a cluster sees of it: progress, lines and warnings, as the workers report them."""

from collections.abc import Callable
from typing import Any

from evenstep.core.errors import EvenstepError
from evenstep.launch.console import Console
from evenstep.run.progress import Progress

__all__ = ["ScriptError", "Shown"]


class ScriptError(EvenstepError):
    """The script or function failed on a worker. Its own traceback is the message."""


class Shown:
    """Shows what workers report.

    Args:
        console: Where.
        on_progress: Called with every progress.
        quiet: Show nothing.
    """

    def __init__(self, console: Console, on_progress: Callable[[Progress], None] | None, *, quiet: bool) -> None:
        self._console, self._on_progress, self._quiet = console, on_progress, quiet

    def say(self, sentence: str) -> None:
        """Say something of our own."""
        if not self._quiet:
            self._console.say(sentence)

    def end(self) -> None:
        """The run is over: show what comes last."""
        if not self._quiet:
            self._console.show_fingerprint()

    def hear(self, report: dict[str, Any]) -> None:
        """Take what a node reports."""
        event = report.get("event", {})
        if "progress" in event and self._on_progress is not None:
            self._on_progress(Progress(**event["progress"]))
        if not self._quiet:
            self._show(report, event)

    def _show(self, report: dict[str, Any], event: dict[str, Any]) -> None:
        worker: int = report.get("worker", 0)
        if "progress" in event:
            self._console.progress(Progress(**event["progress"]))
        elif "prints" in event:
            self._console.print(worker, tuple(event["at"]), event["prints"])
        elif "warning" in event:
            self._console.warn(worker, event["warning"])
        elif "says" in event or "slow" in event:
            self._console.say(event.get("says") or event["slow"])
        elif "fingerprint" in event:
            self._console.note_fingerprint(event["operation"], event["fingerprint"])
        elif (text := report.get("out", report.get("err"))) is not None:
            self._console.begin(worker, again=False)
            self._console.show(worker, [text.encode()], is_error="err" in report)
