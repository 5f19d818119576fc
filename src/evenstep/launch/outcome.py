"""How a run ended: what the user is told last, and the exit code."""

from dataclasses import dataclass
from typing import Any

from evenstep.core.children import signal_name
from evenstep.core.errors import PeerError, Stopped
from evenstep.launch.console import Console
from evenstep.launch.job import Job
from evenstep.launch.roster import MAX_CRASHES, Ending, LastWord, Roster, Stage
from evenstep.launch.seat import Seat

__all__ = ["RunOutcome"]


@dataclass(frozen=True)
class RunOutcome:
    """What is known of a run when its last worker has ended.

    Attributes:
        job: What was run.
        roster: The workers, as they ended.
        began_with: How many workers there were at first.
        trained: Whether the script has made a run.
        failed: The worker whose failure ends the run.
        stop_signal: The signal by which the user asked it to stop.
        stopped: The step after which the workers stopped, and its checkpoint, if they did so as asked.
    """

    job: Job
    roster: Roster
    began_with: int
    trained: bool
    failed: Seat | None
    stop_signal: int | None
    stopped: dict[str, Any] | None

    def tell(self, console: Console) -> int:
        """Tell the user how the run ended; returns the exit code."""
        if self.failed is not None:
            return self._tell_failure(console, self.failed)
        if self.stop_signal is not None and not self._came_to_its_end:
            return self._tell_stop(console, self.stop_signal)
        console.show_fingerprint()
        if self.began_with > 1 and not self.trained:
            console.say(
                f"{self.job.script} made no evenstep.Run: {self.began_with} workers each ran all of it by themselves; "
                "train inside `with evenstep.Run() as run`"
            )
        return 0

    @property
    def _came_to_its_end(self) -> bool:
        """Whether the run was over before it could be stopped: its last step had been done."""
        well = all(w.code == 0 or w.stage is Stage.LEFT for w in self.roster.workers)
        return well and self.roster.is_over and self.roster.ending is not Ending.KILLED

    def _tell_stop(self, console: Console, number: int) -> int:
        name = signal_name(number)
        if self.stopped is None:
            console.say(f"stopped by {name}")
            return 128 + number
        where = self.stopped["checkpoint"]
        saved = f"its checkpoint is {where}: go on with --resume" if where else "nothing was saved"
        console.say(f"stopped by {name} after step {self.stopped['step']}; {saved}")
        return Stopped.exit_code

    def _tell_failure(self, console: Console, worker: Seat) -> int:
        """Show the error of the worker that failed first (the others fail because of it), last and whole."""
        found, code = self.roster.of(worker.number), worker.ended.code
        assert found is not None, "every seat is on the roster"
        if found.fault is not LastWord.MISTAKE:
            always = self.roster.crashes_always(found)
            again = f", like {MAX_CRASHES - 1} before it, with no step committed in between" if always else ""
            console.say(f"{worker.ended.given_up or worker.ended.text}{again}")
        console.show_failure(worker.error)
        if code == 0 and not worker.error:
            console.say("it ended while the others waited for it")
            return PeerError.exit_code
        return code if code > 0 else 128 - code
