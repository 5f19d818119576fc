"""What workers report while they run: each event changes what is known of its worker, or is shown to the user."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from evenstep.core.events import Event
from evenstep.launch.console import Console
from evenstep.launch.crew import RunCrew
from evenstep.launch.roster import LastWord, Script
from evenstep.launch.seat import Seat
from evenstep.page.seen import Seen
from evenstep.run.progress import Progress

__all__ = ["Reports"]


class Reports:
    """Takes what workers write: their output, and their events as lines of JSON.

    Args:
        crew: The workers.
        console: Shows what is for the user.
        seen: Takes what the page of the run shows.
        open_page: Called with the port when the script asks for a page.

    Attributes:
        trained: Whether the script has made a run, even one that meets others only at a server.
        stopped: The step after which the workers stopped, and its checkpoint, if they were asked to.
    """

    def __init__(self, crew: RunCrew, console: Console, seen: Seen, open_page: Callable[[int], None]) -> None:
        self._crew, self._console = crew, console
        self.trained = False
        self.stopped: dict[str, Any] | None = None
        self._wrong: Counter[int] = Counter()  # how often the worker of each place computed wrong
        self._events: dict[str, Callable[[Seat, Event], None]] = {
            "progress": lambda _, event: console.progress(Progress(**event["progress"])),
            "made": self._on_made,
            "shards": self._on_run,
            "waits": self._on_waits,
            "committed": lambda _, event: crew.committed(event["committed"]),
            "silent": self._on_silent,
            "wrong": self._on_wrong,
            "slow": lambda _, event: console.say(event["slow"]),
            "says": lambda _, event: console.say(event["says"]),
            "prints": lambda worker, event: console.print(worker.number, tuple(event["at"]), event["prints"]),
            "warning": lambda worker, event: console.warn(worker.number, event["warning"]),
            "stopped": self._on_stopped,
            "closed": lambda worker, _: self._on_script(worker, Script.CLOSED),
            "ended": lambda worker, _: self._on_script(worker, Script.ENDED),
            "fingerprint": lambda _, event: console.note_fingerprint(event["operation"], event["fingerprint"]),
            "page": lambda _, event: open_page(event["page"]),
            "saved": lambda _, event: seen.saved(event["saved"]),
            "fingerprint now": lambda _, event: seen.fingerprint(*event["fingerprint now"]),
            "error": self._on_error,
            "begins again": self._on_begins_again,
            "final": self._on_final,
        }

    def heard(self, place: int, kind: str, lines: Sequence[bytes]) -> None:
        """The worker of a place has written whole lines to "out", "err" or "events"."""
        worker = self._crew.seats[place]
        if kind != "events":
            self._console.show(worker.number, lines, is_error=kind == "err")
            return
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the worker was killed in the middle of a line
            for name, handle in self._events.items():
                if name in event:
                    handle(worker, event)

    def _on_made(self, _: Seat, __: Event) -> None:
        self.trained = True

    def _on_run(self, worker: Seat, event: Event) -> None:
        self._crew.limit(event["shards"], event["timeout_s"])
        self._on_script(worker, Script.INSIDE)

    def _on_script(self, worker: Seat, script: Script) -> None:
        self._crew.roster = self._crew.roster.speaks(worker.number, script)

    def _on_waits(self, worker: Seat, _: Event) -> None:
        self._console.caught_up(worker.number)
        self._crew.turn(self._crew.roster.waits(worker.number))

    def _on_silent(self, _: Seat, event: Event) -> None:
        culprit = self._crew.seats[event["silent"]]
        known = self._crew.worker(culprit)
        if known.alive and not culprit.given_up and not known.waits:
            self._crew.give_up(culprit, "says nothing: " + event["text"])

    def _on_wrong(self, _: Seat, event: Event) -> None:
        """The other workers have found that one computed wrong; all of them now wait for the next generation."""
        place, most = event["wrong"], event["tolerates"]
        self._wrong[place] += 1
        if self._wrong[place] > most:
            self._console.say(f"{event['text']}; it is dismissed, and the others do the step again")
            self._crew.roster = self._crew.roster.convicts(place)
        else:
            self._console.say(f"{event['text']}; tolerated, {self._wrong[place]} of {most}: the step is done again")

    def _on_stopped(self, _: Seat, event: Event) -> None:
        self.stopped = event["stopped"]
        self._crew.roster = self._crew.roster._replace(has_stopped=True)

    def _on_error(self, worker: Seat, event: Event) -> None:
        worker.error = event["error"]
        fault = LastWord.HOPELESS if event.get("hopeless") else LastWord.ERROR
        self._fault(worker, LastWord.MISTAKE if event.get("mistake") else fault)
        self._console.log_error(worker.number, event["error"])

    def _on_begins_again(self, worker: Seat, _: Event) -> None:
        worker.begins_again = True
        self._fault(worker, LastWord.BEGINS_AGAIN)

    def _on_final(self, worker: Seat, _: Event) -> None:
        self._fault(worker, self._crew.worker(worker).fault, final=True)

    def _fault(self, worker: Seat, fault: LastWord, *, final: bool = False) -> None:
        self._crew.roster = self._crew.roster.faults(worker.number, fault, final=final)
