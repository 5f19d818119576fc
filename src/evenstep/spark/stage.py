"""Runs on the executors of a Spark application: a head beside the driver, and tasks whose workers join it."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from evenstep.agents.head import Head, HeadOrder, figures_for
from evenstep.agents.shares import limits
from evenstep.agents.view import RunView, ScriptError
from evenstep.agents.work import ShippedWork
from evenstep.core.errors import ConfigError
from evenstep.run.progress import Progress
from evenstep.spark.said import said_in
from evenstep.spark.slots import FirstWorkers, await_slots
from evenstep.spark.task import SparkTask, take_part

__all__ = ["ScriptError", "run", "session_of"]

_LOOK_S = 0.25
_ENDING_S = 5.0  # how long tasks may take to end after the run is over
_CANCELLING_S = 60.0  # how long Spark may take to end them itself
_MOST_STAGES = 8


def session_of(session: SparkSession | None) -> SparkSession:
    """The given session, or the active one.

    Raises:
        ConfigError: There is no session, or it cannot run Python tasks.
    """
    found = session or SparkSession.getActiveSession()
    if found is None:
        raise ConfigError("there is no active Spark session; create one first: SparkSession.builder.getOrCreate()")
    if not hasattr(found, "sparkContext"):
        raise ConfigError("a Spark Connect session cannot run Python tasks; use a session inside the cluster")
    return found


def run(
    function_or_script: Callable[..., Any] | str | Path,
    *args: Any,
    workers: int | tuple[int, int] = 4,
    session: SparkSession | None = None,
    shards: int | None = None,
    max_restarts: int | None = None,
    step_timeout_s: float | None = None,
    start_timeout_s: float = 120.0,
    on_progress: Callable[[Progress], None] | None = None,
    trace: str | Path | None = None,
    log_json: str | Path | None = None,
    tensorboard: str | Path | None = None,
    page: int | None = None,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """Train on the executors of a Spark application, with each worker in a task slot of its own.

    Workers of an executor share memory. They join a head beside the driver, which keeps the state. Losing an executor
    costs the current step: the others carry on, Spark runs its tasks again elsewhere, and these join the run.

    Args:
        function_or_script: What every worker runs: a function, which is shipped as Spark ships functions, or the path
            of a script, which is sent to executors that do not have it.
        *args: Arguments of the function, or of the script.
        workers: How many; or a pair: the number to start with at least, and the number to use at most. The application
            must have slots for the smaller number, or dynamic allocation; slots that appear later are used.
        session: The Spark session; None: the active one.
        shards: Parts of every batch; None: as the script says.
        max_restarts: How many workers that die may be replaced on their executor; None: any number.
        step_timeout_s: How long a step may take; None: as the script says.
        start_timeout_s: How long the first workers may take to get their slots, which other jobs may have, and to
            start.
        on_progress: Called with each progress report of the run.
        trace: A file for what every worker did when; as for `evenstep run --trace`.
        log_json: A file that gets a line of JSON for every step; as for `evenstep run --log-json`.
        tensorboard: A directory for TensorBoard event files; as for `evenstep run --tensorboard`.
        page: The port of a page of the run on the driver's machine, 0: any; as for `evenstep run --page`.
        quiet: Show nothing of what the workers print.
        **options: Keyword arguments of the function.

    Returns:
        What the function returns on worker 0, which is the head's; None for a script.

    Raises:
        ConfigError: There is no session, there are too few slots, the function cannot be shipped, or executors have
            different versions; or a file for its figures cannot be written.
        ScriptError: The function or script failed; the message is its traceback.
        KeyboardInterrupt: The run was interrupted, and stopped after a step.
        SilenceError: The first workers did not start in time.
        EvenstepError: Spark gave up.
    """
    context = session_of(session).sparkContext
    least, most = limits(workers)
    work = ShippedWork.of(function_or_script, args, options)
    awaited = await_slots(context, least, most, start_timeout_s)
    view, token = RunView(on_progress, quiet=quiet), secrets.token_hex(16)
    order = HeadOrder(
        context.getConf().get("spark.driver.host"),
        token,
        awaited,
        shards=shards,
        max_restarts=max_restarts,
        step_timeout_s=step_timeout_s,
        **figures_for(trace, log_json, tensorboard, page),
    )
    with (
        view.tracing(trace, function_or_script),
        Head(work, order) as head,
        _Stage(context, SparkTask(work, head.address, token, secrets.token_hex(8)), most) as stage,
    ):
        first = FirstWorkers(head, stage, least, awaited, start_timeout_s, view)
        is_stopping = False
        while head.code is None:
            try:
                for report in head.reports(_LOOK_S):
                    view.hear(report)
                stage.look_after(view)
                first.look()
            except KeyboardInterrupt:
                if is_stopping:
                    raise
                is_stopping = True
                head.stop()
        return view.end(head.code, head.result)


class _Stage:
    """The tasks of the run, in a Spark job. A context manager."""

    def __init__(self, context: Any, task: SparkTask, count: int) -> None:
        self._context, self._task, self._count = context, task, count
        self._num_stages = 0
        self._error: Exception | None = None

    def __enter__(self) -> "_Stage":
        self._submit()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.join(_ENDING_S if kind is None else 0.0)
        if self._thread.is_alive():  # tasks that never got a slot, or that are no longer of any use
            self._context.cancelJobGroup(self._task.name)
            self._thread.join(_CANCELLING_S)

    def _submit(self) -> None:
        self._num_stages += 1
        self._thread = InheritableThread(target=self._run, name="evenstep stage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        task = self._task
        self._context.setJobGroup(task.name, "evenstep", interruptOnCancel=True)
        try:
            self._context.parallelize(range(self._count), self._count).foreachPartition(lambda _: take_part(task))
        except (PySparkException, Py4JError) as error:
            self._error = error

    def running(self) -> tuple[int, int]:
        """How many tasks of ours have a slot, and how many of other jobs.

        Asked of Spark's scheduler itself: its status tracker may be some seconds behind.
        """
        tracker, scheduler = self._context.statusTracker(), self._context._jsc.sc().taskScheduler()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._task.name)]
        stages = {stage: tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds}
        sets = [scheduler.taskSetManagerForAttempt(n, s.currentAttemptId) for n, s in stages.items() if s is not None]
        ours = sum(each.get().runningTasks() for each in sets if each.isDefined())
        executors = scheduler.runningTasksByExecutors().values().toList()
        return ours, sum(executors.apply(n) for n in range(executors.size())) - ours

    def look_after(self, view: RunView) -> None:
        """Submit the tasks again if Spark has given up on them, as it does after several losses."""
        if self._error is None or self._thread.is_alive():
            return
        error, self._error = self._error, None
        said = said_in(error)
        if isinstance(said, ConfigError) or self._num_stages == _MOST_STAGES:
            raise said from error
        view.say("Spark gave up on the tasks of the run; they are being submitted again")
        self._submit()
