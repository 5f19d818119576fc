"""What to run."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evenstep.core.events import Event
from evenstep.launch.door import Listen
from evenstep.plan.groups import Standing

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """A script and how its workers are looked after.

    Attributes:
        script: The training script, or the name of a module.
        args: Its own arguments.
        num_workers: How many workers.
        shards: Parts of every batch; None: the script's.
        log_dir: Where each worker's output goes too.
        max_restarts: How many workers may be replaced in all; None: any number.
        step_timeout_s: How long a step may take; None: the script's `Run(timeout_s=...)`.
        grace_s: How long the first signal gives the run to finish its step and write a checkpoint.
        weights: How much each worker shall do; None: measured.
        resume: Whether to go on from the newest checkpoint.
        standing: Where the workers stand as a group, if there are groups and servers.
        report: Takes progress and fingerprint, and the error that the run ended with, where somebody else shows them.
        recheck: Of how many steps one is computed twice; None: the script's.
        tolerate_wrong: How often a worker may compute wrong before it goes; None: the script's.
        log_json: Where a line of JSON goes for every step.
        tensorboard: Where event files for TensorBoard go.
        trace: Where it goes what every worker did when.
        page: The port of the page of the run; 0: any; None: there is none.
        listen: How other machines join; None: none can.
        keeper: The one worker of this machine keeps the state and computes nothing, unless nobody else is there.
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
