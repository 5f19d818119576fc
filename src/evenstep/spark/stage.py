"""Runs on the executors of a Spark application, as tasks of one barrier stage."""

import json
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from evenstep.agents.orders import Kind
from evenstep.agents.shipping import ship, unship
from evenstep.agents.shown import ScriptError, Shown
from evenstep.core.errors import ConfigError, SilenceError
from evenstep.launch.console import Console
from evenstep.run.progress import Progress
from evenstep.spark.listener import Listener
from evenstep.spark.said import said_in
from evenstep.spark.task import Work, work

__all__ = ["ScriptError", "run", "session_of"]

_LOSS = re.compile(r"ExecutorLostFailure|failed barrier|the node's process .* has ended|Connection reset|worker exited")


def session_of(session: SparkSession | None) -> SparkSession:
    """The session that was given, or the active one.

    Raises:
        ConfigError: There is none.
    """
    found = session or SparkSession.getActiveSession()
    if found is None:
        raise ConfigError("there is no active Spark session; make one first: SparkSession.builder.getOrCreate()")
    if not hasattr(found, "sparkContext"):
        raise ConfigError(
            "a Spark Connect session has no barrier tasks for Python; use a session inside of the cluster"
        )
    return found


def run(
    function_or_script: Callable[..., Any] | str | Path,
    *args: Any,
    workers: int = 4,
    session: SparkSession | None = None,
    shards: int | None = None,
    max_restarts: int = 8,
    step_timeout_s: float | None = None,
    start_timeout_s: float = 120.0,
    on_progress: Callable[[Progress], None] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """Train on the executors of a Spark application: so many workers, each in a slot of its own.

    The workers of an executor share memory. Workers that die are started again, and if an executor is lost, the whole
    stage. Either way the run goes on from the last checkpoint of `run.checkpoint(...)`, if the script writes
    any to a directory that all executors share, and from its beginning otherwise: to the same bits.

    Args:
        function_or_script: What every worker runs: a function, which is shipped as Spark ships functions, or the path
            of a script, which is taken from here where an executor has none.
        *args: Arguments of the function, or of the script.
        workers: How many; the application must have as many free slots.
        session: The Spark session; None: the active one.
        shards: Parts of every batch; None: the script's.
        max_restarts: How often workers that were lost are started again.
        step_timeout_s: How long any wait for another worker may take; None: the script's.
        start_timeout_s: How long a node may take to be ready.
        on_progress: Called with the progress of the run as it comes, from a thread.
        quiet: Show nothing of what the workers print.
        **options: Keyword arguments of the function.

    Returns:
        What the function returns on worker 0; None for a script.

    Raises:
        ConfigError: There is no session, there are too few slots, the function cannot be shipped, or executors have
            different versions.
        ScriptError: The function or script has failed; the message is its traceback.
        SilenceError: Workers were lost more often than `max_restarts`.
    """
    context = session_of(session).sparkContext
    _check_slots(context, workers)
    is_script = isinstance(function_or_script, str | Path)
    if is_script and not Path(function_or_script).is_file():  # type: ignore[arg-type]  # it is one of them
        raise ConfigError(f"there is no script {function_or_script}; name a Python file to run")
    if is_script and options:
        raise ConfigError(f"{next(iter(options))}=... is no option of evenstep.spark.run; a script takes none by name")
    script = (str(Path(function_or_script).resolve()), Path(function_or_script).read_text()) if is_script else None  # type: ignore[arg-type]  # as above
    function = None if is_script else ship(function_or_script, args, options)  # type: ignore[arg-type]  # as above
    with Console(None, workers) as console:
        show = Shown(console, on_progress, quiet=quiet)
        with Listener(context.getConf().get("spark.driver.host"), show.hear) as listener:
            job = Work(
                function, script, tuple(map(str, args)) if is_script else (), shards, step_timeout_s, listener.address,
                listener.token, start_timeout_s, max_restarts,
            )  # fmt: skip
            head, _, result = _submit(context, job, workers, show).partition(b"\n")
        verdict = json.loads(head)
        if verdict["kind"] == Kind.DONE.value:
            show.end()
    if verdict["kind"] == Kind.FAILED.value:
        raise ScriptError(verdict["text"].rstrip())
    if verdict["kind"] == Kind.LOST.value:
        raise SilenceError(f"{verdict['text']}, and workers were restarted {max_restarts} times before; giving up")
    return unship(result) if result else None


def _submit(context: Any, job: Work, workers: int, show: Shown) -> bytes:
    """Run the stage, again if an executor is lost: Spark itself does not repeat the last stage of a job."""
    for restarts in count():
        try:
            stage = context.parallelize(range(workers), workers).barrier().mapPartitions(lambda _: work(job))
            found: bytes = stage.collect()[0]
            return found
        except (PySparkException, Py4JError) as error:
            if restarts == job.max_restarts or not _LOSS.search(str(error)):
                raise said_in(error) from error
        show.say("an executor or what it ran for us was lost; starting again")
        deadline = time.monotonic() + job.start_timeout_s
        while _slots(context) < workers and time.monotonic() < deadline:
            time.sleep(0.2)
        _check_slots(context, workers)
    raise AssertionError("it goes on until it returns or raises")


def _slots(context: Any) -> int:
    """For how many tasks there is room at once."""
    inner = context._jsc.sc()
    return int(inner.maxNumConcurrentTasks(inner.resourceProfileManager().defaultResourceProfile()))


def _check_slots(context: Any, workers: int) -> None:
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers={workers!r}, expected a whole number above 0")
    slots = _slots(context)
    if slots < workers:
        raise ConfigError(
            f"{workers} workers, but the application has {slots} slots for tasks; expected one for each: use fewer, or "
            "start it with more cores (spark.executor.instances, spark.executor.cores)"
        )
