"""Runs on a Ray cluster: one agent for each node that is used, placed by Ray, and a run that outlives any of them."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from evenstep.agents.agent import ends_of
from evenstep.agents.orders import End, Kind, Order, Verdict, compare_nodes, judge, share_out
from evenstep.agents.shipping import ship, unship
from evenstep.agents.shown import ScriptError, Shown
from evenstep.core import env
from evenstep.core.errors import ConfigError, SilenceError
from evenstep.launch.console import Console
from evenstep.ray.actors import AgentActor
from evenstep.run.progress import Progress

__all__ = ["ScriptError", "run"]

_LOOK_S = 0.25
_PLACING_S = 20.0
_KNOCKING_S = 10.0
_GRACE_S = 3.0  # how long the workers of other nodes have to end by themselves once one has failed


@dataclass
class _Placed:
    """An agent, where it is, and what came of its workers."""

    node: str
    count: int
    group: PlacementGroup
    actor: Any
    asked: Any = None  # the reports that are on their way
    ends: list[End] = field(default_factory=list)
    running: int = 0

    def remove(self) -> None:
        """Take it out of the cluster; whatever of it is gone already does not matter."""
        with suppress(RayError, GetTimeoutError):
            ray.get(self.actor.close.remote(), timeout=10.0)
        ray.kill(self.actor)
        remove_placement_group(self.group)


def run(
    function_or_script: Callable[..., Any] | str | Path,
    *args: Any,
    workers: int | tuple[int, int] = 2,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    address: str | None = None,
    shards: int | None = None,
    max_restarts: int = 8,
    step_timeout_s: float | None = None,
    start_timeout_s: float = 120.0,
    resume: bool = False,
    working_dir: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """Train on the nodes of a Ray cluster.

    Ray places one agent on every node that is used; the workers of a node share memory. When a worker or a node is
    lost, the run is started again where there is room, on fewer workers if need be, and goes on from the last
    checkpoint of `run.checkpoint(...)`, if the script writes any to a directory that all nodes share, else from its
    beginning: to the same bits. Nothing of ours is left in the cluster afterwards.

    Args:
        function_or_script: What every worker runs: a function, which is shipped as Ray ships functions, or the path of
            a script, which is taken from here where a node has none.
        *args: Arguments of the function, or of the script.
        workers: How many; or the least and the most: then as many as there is room for whenever the run is started.
        cpus_per_worker: CPUs that each takes.
        gpus_per_worker: GPUs that each takes.
        address: Of the cluster; None: the one that is connected already, or `RAY_ADDRESS`, or this machine's.
        shards: Parts of every batch; None: the script's.
        max_restarts: How often the run is started again.
        step_timeout_s: How long any wait for another worker may take; None: the script's.
        start_timeout_s: How long a node may take to be ready.
        resume: Go on from the newest checkpoint of an earlier run.
        working_dir: A directory that travels to all nodes by Ray's runtime environment, and in which workers run.
        on_progress: Called with the progress of the run, as it comes.
        quiet: Show nothing of what the workers print.
        **options: Keyword arguments of the function.

    Returns:
        What the function returns on worker 0; None for a script.

    Raises:
        ConfigError: No cluster can be reached, it has too few resources, the function cannot be shipped, or nodes have
            different versions.
        ScriptError: The function or script has failed; the message is its traceback.
        SilenceError: Workers were lost more often than `max_restarts`.
    """
    least, most = _numbers(workers)
    work = _Work.of(function_or_script, args, options, working_dir)
    connected_here = _connect(address, working_dir)
    try:
        with Console(None, most) as console:
            shown = Shown(console, on_progress, quiet=quiet)
            job = _Job(
                work, least, most, {"CPU": cpus_per_worker, "GPU": gpus_per_worker}, shards, step_timeout_s,
                start_timeout_s, shown,
            )  # fmt: skip
            try:
                return job.run(max_restarts, resume=resume)
            finally:
                job.close()
    finally:
        if connected_here:
            ray.shutdown()


@dataclass(frozen=True)
class _Work:
    function: bytes | None
    script: tuple[str, str] | None
    args: tuple[str, ...]

    @classmethod
    def of(
        cls,
        what: Callable[..., Any] | str | Path,
        args: tuple[Any, ...],
        options: dict[str, Any],
        working_dir: str | None,
    ) -> "_Work":
        """What is to be run, from what a user says."""
        if not isinstance(what, str | Path):
            return cls(ship(what, args, options), None, ())
        if not Path(what).is_file():
            raise ConfigError(f"there is no script {what}; name a Python file to run")
        if options:
            raise ConfigError(
                f"{next(iter(options))}=... is no option of evenstep.ray.run; a script takes none by name"
            )
        path = Path(what).resolve()
        if working_dir is not None and path.is_relative_to(Path(working_dir).resolve()):
            path = path.relative_to(Path(working_dir).resolve())  # there it lies in a directory of Ray's
        return cls(None, (str(path), Path(what).read_text()), tuple(map(str, args)))


class _Job:
    """One run, over as many attempts as it takes."""

    def __init__(
        self,
        work: _Work,
        least: int,
        most: int,
        needs: dict[str, float],
        shards: int | None,
        step_timeout_s: float | None,
        start_timeout_s: float,
        shown: Shown,
    ) -> None:
        self._work, self._least, self._most, self._needs = work, least, most, needs
        self._shards, self._step_timeout_s, self._start_timeout_s = shards, step_timeout_s, start_timeout_s
        self._shown = shown
        self._placed: list[_Placed] = []

    def run(self, max_restarts: int, *, resume: bool) -> Any:
        """Try until it is done."""
        for attempt in range(max_restarts + 1):
            self._place()
            verdict = self._attempt(resume=resume or attempt > 0)
            if verdict.kind is Kind.FAILED:
                raise ScriptError(verdict.text.rstrip())
            if verdict.kind is Kind.DONE:
                self._shown.end()
                result = ray.get(self._placed[0].actor.result.remote())
                return None if result is None else unship(result)
            self._shown.say(f"{verdict.text}; starting again")
        raise SilenceError(f"{verdict.text}, and the run was started again {max_restarts} times before; giving up")

    def close(self) -> None:
        """Leave nothing of ours in the cluster."""
        placed, self._placed = self._placed, []
        for each in placed:
            each.remove()

    # ---- where ----

    def _place(self) -> None:
        """Have agents on as few nodes as there is room on for as many workers as wanted; keep those that are there."""
        deadline = time.monotonic() + _PLACING_S
        while True:
            here = {each.node: each for each in self._placed}
            nodes = _nodes()
            room = [
                _room(free, self._needs) + (here[node].count if node in here else 0) for node, free in nodes.items()
            ]
            if sum(room) >= self._least or time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)  # what was lost a moment ago may be free again soon
        try:
            counts = share_out(room, self._least, self._most)
        except ConfigError as error:
            needs = " and ".join(f"{amount:g} {kind}" for kind, amount in self._needs.items() if amount)
            free = ", ".join(f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU" for free in nodes.values())
            raise ConfigError(
                f"{error}: each takes {needs}, and {len(nodes)} nodes have free: {free or 'nothing'}; ask for fewer or "
                "smaller ones, or add nodes"
            ) from None
        wanted = {node: count for node, count in zip(nodes, counts, strict=True) if count}
        for old in [each for each in self._placed if wanted.get(each.node) != each.count]:
            old.remove()
            self._placed.remove(old)
        kept = {each.node for each in self._placed}
        self._placed += [self._start(node, count) for node, count in wanted.items() if node not in kept]
        self._await_ready()

    def _start(self, node: str, count: int) -> _Placed:
        bundle = {kind: amount * count for kind, amount in self._needs.items() if amount}
        group = placement_group([bundle or {"CPU": 0.001}], bundle_label_selector=[{"ray.io/node-id": node}])
        actor = AgentActor.options(  # type: ignore[attr-defined]  # Ray's decorator adds it
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
        ).remote()
        return _Placed(node, count, group, actor)

    def _await_ready(self) -> None:
        """Wait until all agents are ready, and see that they are alike; one whose node is lost by now is left out."""
        asked = [(each, each.actor.facts.remote(self._start_timeout_s)) for each in self._placed]
        facts = []
        for each, reference in asked:
            try:
                facts.append(ray.get(reference, timeout=self._start_timeout_s + _PLACING_S))
            except (RayError, GetTimeoutError) as error:
                self._shown.say(f"the agent on node {each.node[:8]} did not start: {error}")
                each.remove()
                self._placed.remove(each)
        if sum(each.count for each in self._placed) < self._least:
            raise ConfigError(
                f"agents for {sum(each.count for each in self._placed)} workers could be started, expected at least "
                f"{self._least}; look at the log of the cluster"
            )
        compare_nodes(facts)

    # ---- what ----

    def _attempt(self, *, resume: bool) -> Verdict:
        """Start all workers and hear them until the last has ended or a node is lost."""
        num_workers, first = sum(each.count for each in self._placed), 0
        try:
            host, port = ray.get(self._placed[0].actor.host.remote(self._start_timeout_s))
            for each in self._placed:
                order = Order(
                    "",
                    self._work.args,
                    tuple(range(first, first + each.count)),
                    num_workers,
                    host,
                    port,
                    resume=resume,
                    shards=self._shards,
                    step_timeout_s=self._step_timeout_s,
                )
                first += each.count
                each.ends, each.running = [], each.count
                ray.get(each.actor.start.remote(order, self._work.function, self._work.script))
                each.asked = each.actor.reports.remote(_LOOK_S)
        except RayError:
            return self._after_loss()
        return self._hear()

    def _hear(self) -> Verdict:
        lost, deadline = False, float("inf")
        while any(each.running for each in self._placed):
            if time.monotonic() > deadline:  # who has not met the others yet would wait for them for long
                deadline = float("inf")
                for each in self._placed:
                    each.actor.stop.remote()
            waiting = {each.asked: each for each in self._placed if each.running}
            ready, _ = ray.wait(list(waiting), timeout=10 * _LOOK_S)
            for reference in ready:
                each = waiting[reference]
                try:
                    reports, each.running = ray.get(reference)
                except RayError:
                    lost, each.running, each.count = True, 0, 0
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                    continue
                each.ends += ends_of(reports)
                if any(end.code for end in each.ends):
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                for report in reports:
                    self._shown.hear(report)
                each.asked = each.actor.reports.remote(_LOOK_S) if each.running else None
        return self._after_loss() if lost else judge([end for each in self._placed for end in each.ends])

    def _after_loss(self) -> Verdict:
        """A node or its agent is gone: end the workers of the others, and say which it was."""
        gone = []
        for each in list(self._placed):
            try:
                ray.get(each.actor.stop.remote(), timeout=_PLACING_S)
                while each.running:
                    _, each.running = ray.get(each.actor.reports.remote(_LOOK_S), timeout=_PLACING_S)
            except (RayError, GetTimeoutError):
                gone.append(each.node[:8])
                each.remove()
                self._placed.remove(each)
        said = judge([end for each in self._placed for end in each.ends])
        text = f"the agent on node {', '.join(gone)} was lost" if gone else said.text
        return said if said.kind is Kind.FAILED and not gone else Verdict(Kind.LOST, text, 1)


def _numbers(workers: int | tuple[int, int]) -> tuple[int, int]:
    least, most = workers if isinstance(workers, tuple) else (workers, workers)
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
        raise ConfigError(f"workers={workers!r}, expected a whole number above 0, or the least and the most of them")
    return least, most


def _connect(address: str | None, working_dir: str | None) -> bool:
    """Be connected to a cluster; whether that was not so before."""
    if ray.is_initialized():
        if working_dir is not None:
            raise ConfigError(
                f"working_dir={working_dir!r}, but Ray is connected already; say it there: "
                "ray.init(runtime_env={'working_dir': ...})"
            )
        return False
    where = address or env.ray_address() or "auto"
    try:
        _knock(where)
        ray.init(
            address=where,
            log_to_driver=False,
            logging_level="error",
            runtime_env=None if working_dir is None else {"working_dir": working_dir},
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster can be reached at {where}: {str(error).splitlines()[0]}; start one with `ray start "
            "--head`, or set RAY_ADDRESS"
        ) from error
    return True


def _knock(address: str) -> None:
    """See whether anybody is there: Ray itself would wait for minutes.

    Raises:
        OSError: Nobody.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), _KNOCKING_S).close()


def _nodes() -> dict[str, dict[str, float]]:
    """What every living node has free, by its id."""
    free = available_resources_per_node()
    return {node["NodeID"]: free.get(node["NodeID"], {}) for node in ray.nodes() if node["Alive"]}


def _room(free: dict[str, float], needs: dict[str, float]) -> int:
    """For how many workers there is room."""
    return min((int((free.get(kind, 0.0) + 1e-6) // amount) for kind, amount in needs.items() if amount), default=1)
