"""What to run: a script, and everything the command line says about its workers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns

from evenstep.core.events import Event
from evenstep.launch.door import Listen
from evenstep.plan.groups import Standing

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """A script, and how its workers are looked after.

    Attributes:
        script: The training script, or the name of a module.
        args: Its own arguments.
        num_workers: How many workers.
        shards: Parts of every batch; None: as the script says.
        log_dir: A directory for a log of each worker's output.
        max_restarts: How many workers may be replaced in all; None: any number.
        step_timeout_s: How long a step may take; None: the script's `Run(timeout_s=...)`.
        grace_s: How long the run may take after the first signal to finish its step and write a checkpoint.
        weights: Each worker's share of the work; None: measured.
        resume: Whether to continue from the newest checkpoint.
        standing: The position of these workers among groups, if there are groups and servers.
        report: Takes progress, fingerprint, the error that ended the run and the events of a trace, if another process
            shows them and writes the trace.
        recheck: One step in this many is computed twice; None: as the script says.
        tolerate_wrong: How often a worker may compute wrong before it is dismissed; None: as the script says.
        log_json: The file that gets a line of JSON for every step.
        tensorboard: The directory for TensorBoard event files.
        trace: The file for a trace of what every worker did when.
        page: The port of the page of the run; 0: any; None: there is no page.
        listen: How other machines join; None: they cannot.
        keeper: Whether the one worker of this machine only keeps the state, as long as there are others.
        began_ns: When it began, by this machine's monotonic clock: the zero of its trace.
    """

    script: Path | str
    args: tuple[str, ...]
    num_workers: int
    shards: int | None = None
    log_dir: Path | None = None
    max_restarts: int | None = None
    step_timeout_s: float | None = None
    grace_s: float = 30.0
    weights: tuple[float, ...] | None = None
    resume: bool = False
    standing: Standing | None = None
    report: Callable[[Event], None] | None = None
    recheck: int | None = None
    tolerate_wrong: int | None = None
    log_json: Path | None = None
    tensorboard: Path | None = None
    trace: Path | None = None
    page: int | None = None
    listen: Listen | None = None
    keeper: bool = False
    began_ns: int = field(default_factory=monotonic_ns, compare=False)

    @property
    def group(self) -> int | None:
        """The number of its group, if there are several."""
        return None if self.standing is None or self.standing.groups == 1 else self.standing.group
