"""Writes down the figures of every step while a run goes on."""

from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic

from evenstep.exchange.figures import Figures
from evenstep.launch.job import Job
from evenstep.launch.records import EventFile, JsonLines, Record
from evenstep.transport.segment import Segment

__all__ = ["Scribe"]

_EVERY_S = 0.2
_MOST = 2000  # entries at once: the supervisor has other things to do


class Scribe:
    """Copies figures from the journal to the files that the user wants; one that cannot be written is reported once.

    Args:
        segment: The segment of the run.
        job: Names the files.
        say: Takes sentences for the user.

    Raises:
        ConfigError: A file cannot be written at the start.
    """

    def __init__(self, segment: Segment, job: Job, say: Callable[[str], None]) -> None:
        self._figures, self._say = Figures(segment), say
        self._written, self._next_s = 0, 0.0
        self._records: dict[str, Record] = {}
        with ExitStack() as opened:
            for option, place, kind in (
                ("--log-json", job.log_json, JsonLines),
                ("--tensorboard", job.tensorboard, EventFile),
            ):
                if place is not None:
                    record: Record = kind(place, job.group)
                    opened.callback(record.close)
                    self._records[f"{option} {place}"] = record
            self._opened = opened.pop_all()

    def write(self) -> None:
        """Write what is new, if it is time to."""
        if self._records and monotonic() >= self._next_s:
            self._write(_MOST)
            self._next_s = monotonic() + _EVERY_S

    def finish(self, *, trained: bool) -> None:
        """Write the rest.

        Args:
            trained: Whether the script has made a run, and has not failed.
        """
        if not self._records:
            return
        self._write(None)
        if trained and not self._written:
            self._say(
                f"no step was recorded for {', '.join(self._records)}: workers that meet only at a server have steps "
                "of their own; see the server's page"
            )

    def _write(self, most: int | None) -> None:
        for found in self._figures.news(most):
            self._written += 1
            for name, record in list(self._records.items()):
                try:
                    record.add(found)
                except OSError as error:
                    del self._records[name]
                    self._say(f"{name} could not be written from step {found.step} on: {error.strerror}")

    def close(self) -> None:
        """Close the files."""
        self._opened.close()
