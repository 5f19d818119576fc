"""What the tasks of a barrier stage do: one of each executor looks after a node with a worker for each of them."""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import BarrierTaskContext

from evenstep.agents.agent import Agent, ends_of
from evenstep.agents.orders import End, Kind, Order, Verdict, compare_nodes, judge
from evenstep.core.errors import ConfigError
from evenstep.spark.listener import Teller

__all__ = ["Work", "groups_of", "work"]

_LOOK_S = 0.25


@dataclass(frozen=True)
class Work:
    """What is to be done.

    Attributes:
        function: A shipped function; None: there is a script.
        script: The path of a script, and what it says.
        args: Of the script.
        shards: Parts of every batch; None: the script's.
        step_timeout_s: How long any wait for another worker may take; None: the script's.
        listener: Where the driver listens.
        token: What it wants to hear.
        start_timeout_s: How long a node may take to be ready.
        max_restarts: How often workers that were lost are started again by the tasks themselves.
    """

    function: bytes | None
    script: tuple[str, str] | None
    args: tuple[str, ...]
    shards: int | None
    step_timeout_s: float | None
    listener: tuple[str, int]
    token: str
    start_timeout_s: float
    max_restarts: int


def groups_of(executors: Sequence[str]) -> list[list[int]]:
    """The tasks of every executor, in the order of the first of each."""
    found: dict[str, list[int]] = {}
    for task, executor in enumerate(executors):
        found.setdefault(executor, []).append(task)
    return list(found.values())


def work(job: Work) -> Iterator[bytes]:
    """Be a task: yields what worker 0 has returned, as JSON before bytes, if it was here."""
    context = BarrierTaskContext.get()
    task = context.partitionId()
    executor = f"{socket.gethostname()} {os.getppid()}"  # all tasks of an executor are forked from one process
    groups = groups_of(context.allGather(executor))
    mine = next(group for group in groups if task in group)
    if task != mine[0]:
        _accompany(context)
        return
    first = [sum(len(group) for group in groups[:number]) for number in range(len(groups))][groups.index(mine)]
    workers = range(first, first + len(mine))
    with Teller(job.listener, job.token, first=task == 0) as teller, Agent() as agent:
        verdict, result = _attempts(context, job, agent, teller, workers, sum(map(len, groups)))
    if task == 0:
        head = {"kind": verdict.kind.value, "text": verdict.text, "code": verdict.code}
        yield json.dumps(head).encode() + b"\n" + (result or b"")


def _accompany(context: BarrierTaskContext) -> None:
    """Hold a place for a worker that another task of this executor looks after."""
    while True:
        _share(context, None)
        _share(context, None)
        if _is_over(_share(context, None)):
            return


def _share(context: BarrierTaskContext, value: Any) -> list[Any]:
    """What all tasks say, but for those that only hold a place. Spark fails the stage if one of them is lost."""
    return [found for text in context.allGather(json.dumps(value)) if (found := json.loads(text)) is not None]


def _is_over(said: Sequence[dict[str, Any]]) -> bool:
    """Whether what all nodes say of an attempt ends the run."""
    return _worst(said).kind is not Kind.LOST or any(node["last"] for node in said)


def _attempts(
    context: BarrierTaskContext, job: Work, agent: Agent, teller: Teller, workers: range, num_workers: int
) -> tuple[Verdict, bytes | None]:
    try:
        facts: dict[str, Any] = {"facts": agent.facts(job.start_timeout_s)}
    except Exception as error:  # noqa: BLE001  # the border of the task: all tasks hear of it
        facts = {"failure": str(error)}
    attempt = teller.attempt
    while True:
        known = _share(context, {**facts, "attempt": attempt})
        failure = _failure(known)
        again = max(node["attempt"] for node in known) > 1
        port = agent.host(job.start_timeout_s) if workers.start == 0 and failure is None else 0
        hosts = _share(context, {"host": context.getTaskInfos()[0].address.rpartition(":")[0], "port": port})
        ends: list[End] = []
        if failure is None:
            place = next((host["host"], host["port"]) for host in hosts if host["port"])
            agent.start(_order(job, agent, workers, num_workers, place, again))
            while agent.num_running:
                reports = agent.reports(_LOOK_S)
                ends += ends_of(reports)
                for report in reports:
                    teller.tell(report)
                if teller.is_told_to_stop():
                    agent.stop()
        verdict = failure or judge(ends)
        mine = {"kind": verdict.kind.value, "text": verdict.text, "code": verdict.code}
        said = _share(context, {**mine, "last": attempt > job.max_restarts})
        if _is_over(said):
            return _worst(said), agent.result()
        attempt += 1


def _failure(known: Sequence[dict[str, Any]]) -> Verdict | None:
    for node in known:
        if "failure" in node:
            return Verdict(Kind.FAILED, node["failure"], 6)
    try:
        compare_nodes([node["facts"] for node in known])
    except ConfigError as error:
        return Verdict(Kind.FAILED, str(error), error.exit_code)
    return None


def _worst(said: Sequence[dict[str, Any]]) -> Verdict:
    """What an attempt came to on all nodes together."""
    order = [Kind.FAILED, Kind.LOST, Kind.DONE]
    worst = min(said, key=lambda node: order.index(Kind(node["kind"])))
    return Verdict(Kind(worst["kind"]), worst["text"], worst["code"])


def _order(job: Work, agent: Agent, workers: range, num_workers: int, place: tuple[str, int], resume: bool) -> Order:
    if job.function is not None:
        script, args = agent.function(job.function)
    else:
        assert job.script is not None, "there is one of them"
        script, args = agent.script(*job.script), job.args
    return Order(
        script, args, tuple(workers), num_workers, *place, resume=resume, shards=job.shards,
        step_timeout_s=job.step_timeout_s,
    )  # fmt: skip
