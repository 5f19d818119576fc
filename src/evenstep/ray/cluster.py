"""Runs on a Ray cluster: a head beside the driver, and agents that Ray places on nodes, which may come and go."""

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from evenstep.agents.head import figures_for
from evenstep.agents.shares import limits, share_out
from evenstep.agents.view import RunView, ScriptError
from evenstep.agents.work import ShippedWork
from evenstep.core.errors import ConfigError, PeerError, SilenceError
from evenstep.ray.actors import AgentActor, HeadActor
from evenstep.ray.connection import connect, is_client, refuse_far
from evenstep.ray.room import as_options, needs_of_worker, node_of_driver, nodes_of_cluster, room_in
from evenstep.run.progress import Progress

__all__ = ["ScriptError", "run"]

_LOOK_S = 0.25  # how long to wait for something to happen
_NODES_S = 1.0  # how often to look whether there is room for more workers
_PLACING_S = 20.0
_PATIENCE_S = 5.0  # until the user is told what is waited for
_RETURNING_S = 1.5  # until what tasks have had is free again, as Ray sees it


def run(
    function_or_script: Callable[..., Any] | str | Path,
    *args: Any,
    workers: int | tuple[int, int] = 2,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    resources_per_worker: Mapping[str, float] | None = None,
    address: str | None = None,
    shards: int | None = None,
    max_restarts: int | None = None,
    step_timeout_s: float | None = None,
    start_timeout_s: float = 120.0,
    resume: bool = False,
    working_dir: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    trace: str | Path | None = None,
    log_json: str | Path | None = None,
    tensorboard: str | Path | None = None,
    page: int | None = None,
    quiet: bool = False,
    **options: Any,
) -> Any:
    """Train on the nodes of a Ray cluster.

    The head is on the driver's node, with the workers of that node. Ray places one agent on every other node that is
    used; the workers of a node share memory. If the driver's node has no room, the head has one worker that takes no
    CPU and only keeps the state. Losing a node costs the current step: the others carry on, and while there are fewer
    workers than were asked for, agents are placed wherever there is room, including nodes that appear later. Nothing is
    left in the cluster afterwards.

    Args:
        function_or_script: What every worker runs: a function, which is shipped as Ray ships functions, or the path of
            a script, which is sent to nodes that do not have it.
        *args: Arguments of the function, or of the script.
        workers: How many; or a pair: the number to start with at least, and the number to use at most.
        cpus_per_worker: CPUs that each worker takes.
        gpus_per_worker: GPUs that each worker takes; then all workers are on one node and stay there.
        resources_per_worker: Other resources, of the cluster's own names, that each worker takes.
        address: The address of the cluster; None: the one already connected to, or `RAY_ADDRESS`, or this machine's.
        shards: Parts of every batch; None: as the script says.
        max_restarts: How many workers that die may be replaced on their node; None: any number.
        step_timeout_s: How long a step may take; None: as the script says.
        start_timeout_s: How long the cluster may take to have room for the first workers, which others may have taken,
            and again to bring them up.
        resume: Continue from the newest checkpoint of an earlier run.
        working_dir: A directory that Ray's runtime environment copies to all nodes, and in which workers run.
        on_progress: Called with each progress report of the run.
        trace: A file, written by this process, for what every worker did when; as for `evenstep run --trace`.
        log_json: A file that gets a line of JSON for every step; as for `evenstep run --log-json`.
        tensorboard: A directory for TensorBoard event files; as for `evenstep run --tensorboard`.
        page: The port of a page of the run on this machine, 0: any; as for `evenstep run --page`.
        quiet: Show nothing of what the workers print.
        **options: Keyword arguments of the function.

    Returns:
        What the function returns on worker 0, which is the head's; None for a script.

    Raises:
        ConfigError: No cluster can be reached, it has too few resources, the function cannot be shipped, or nodes have
            different versions; an argument makes no sense; or the trace cannot be written.
        ScriptError: The function or script failed; the message is its traceback.
        KeyboardInterrupt: The run was interrupted, and stopped after a step.
        PeerError: The head's node is lost.
        SilenceError: The first workers had no room in time, or were not there in time.
    """
    least, most = limits(workers)
    needs = needs_of_worker(cpus_per_worker, gpus_per_worker, resources_per_worker or {})
    work, view = ShippedWork.of(function_or_script, args, options, working_dir), RunView(on_progress, quiet=quiet)
    more: dict[str, Any] = {
        "shards": shards,
        "max_restarts": max_restarts,
        "step_timeout_s": step_timeout_s,
        "resume": resume,
        **figures_for(trace, log_json, tensorboard, page),
    }
    with ExitStack() as stack:
        stack.enter_context(view.tracing(trace, function_or_script))  # it forks, and Ray has no threads here yet
        if connect(address, working_dir):
            stack.callback(ray.shutdown)
        if is_client():
            refuse_far(log_json=log_json, tensorboard=tensorboard, page=page)
        guest = stack.enter_context(closing(_Guest(work, least, most, needs, start_timeout_s, view)))
        return guest.run(more)


@dataclass
class _Placed:
    """An actor with workers, and where it is."""

    node: str
    count: int
    group: PlacementGroup
    actor: Any
    over: Any  # what AgentActor.join will return
    since: float = field(default_factory=time.monotonic)

    @property
    def is_stuck(self) -> bool:
        """Whether the room that was found went to another job."""
        waits_long = time.monotonic() - self.since > _PLACING_S
        return waits_long and placement_group_table(self.group)["state"] in ("PENDING", "PREPARED")

    def remove(self) -> None:
        """Take it out of the cluster; parts that are gone already do not matter."""
        ray.kill(self.actor)
        remove_placement_group(self.group)


class _Guest:
    """One run: its head, its agents, and where Ray has placed them."""

    def __init__(
        self, work: ShippedWork, least: int, most: int, needs: dict[str, float], start_timeout_s: float, view: RunView
    ) -> None:
        self._work, self._least, self._most, self._needs = work, least, most, needs
        self._start_timeout_s, self._view = start_timeout_s, view
        self._token = secrets.token_hex(16)
        self._head: Any = None
        self._group: PlacementGroup | None = None  # of a head that has workers itself
        self._on_head = 0  # how many it has
        self._placed: list[_Placed] = []
        self._refused: set[str] = set()  # nodes
        self._looked_at = 0.0
        self._has_begun = False
        self._begin = time.monotonic()
        self._deadline = self._begin + start_timeout_s
        self._code: int | None = None
        self._is_stopping = False
        self._is_over = False  # as an agent has heard: then there is nothing to place agents for

    def run(self, options: dict[str, Any]) -> Any:
        """Carry out the run; returns what the function returned."""
        shares = self._start_head(options)
        for node, count in shares.items():
            self._place(node, count)
        while self._code is None:
            try:
                self._turn()
            except KeyboardInterrupt:
                if self._is_stopping:
                    raise
                self._is_stopping = True
                self._head.stop.remote()
        return self._view.end(self._code, self._of_head(self._head.result.remote()))

    def close(self) -> None:
        """Leave nothing in the cluster."""
        for each in self._placed:
            each.remove()
        if self._head is not None:
            ray.kill(self._head)
        if self._group is not None:
            remove_placement_group(self._group)

    # ---- where ----

    def _find_room(self) -> dict[str, int]:
        """How many workers each node gets at first; waits for room that others have, briefly for the driver's node.

        Raises:
            ConfigError: There would be too little room even if nobody else had any, and no node appears for a while.
            SilenceError: Others have not left enough of it in time.
        """
        was_said = False
        while True:
            nodes, waited_s = nodes_of_cluster(), time.monotonic() - self._begin
            room, could = self._rooms(nodes), self._rooms(nodes_of_cluster(whole=True))
            if sum(room) >= self._least and (room[0] >= min(could[0], self._most) or waited_s > _RETURNING_S):
                self._deadline = time.monotonic() + self._start_timeout_s
                shares = share_out(room, self._least, self._most)
                return {node: count for node, count in zip(nodes, shares, strict=True) if count}
            enough = sum(could) >= self._least
            if waited_s > (self._start_timeout_s if enough else min(_PLACING_S, self._start_timeout_s)):
                remedy = "ask for fewer or smaller workers, or add nodes"
                if enough:
                    remedy = f"others did not leave the rest within {self._start_timeout_s:g} s (start_timeout_s)"
                raise (SilenceError if enough else ConfigError)(f"{self._lacks(room, nodes)}; {remedy}")
            if enough and waited_s > _PATIENCE_S and not was_said:
                was_said = True
                self._view.warn(f"{self._lacks(room, nodes)}; waiting for up to {self._start_timeout_s:g} s")
            time.sleep(_LOOK_S)

    def _rooms(self, nodes: dict[str, dict[str, float]]) -> list[int]:
        """How many workers fit on each node."""
        room = [room_in(free, self._needs) for free in nodes.values()]
        if self._needs["GPU"]:  # all on one node
            room = [count if n == room.index(max(room)) else 0 for n, count in enumerate(room)]
        return room

    def _lacks(self, room: list[int], nodes: dict[str, dict[str, float]]) -> str:
        """What is asked for and what is free, in words."""
        needs = " and ".join(f"{amount:g} {kind}" for kind, amount in self._needs.items() if amount)
        kinds = [kind for kind in self._needs if kind in ("CPU", "GPU") or self._needs[kind]]
        free = ", ".join(" and ".join(f"{free.get(kind, 0):g} {kind}" for kind in kinds) for free in nodes.values())
        there = "1 node has" if len(nodes) == 1 else f"{len(nodes)} nodes have"
        where = " on one node, since GPUs of several nodes are not used together" if self._needs["GPU"] else ""
        return (
            f"there is room for {sum(room)} workers, expected at least {self._least}{where}: each takes {needs}, and "
            f"{there} free: {free or 'nothing'}"
        )

    def _start_head(self, options: dict[str, Any]) -> dict[str, int]:
        """Start the head, with the workers of its node; returns how many workers the other nodes get."""
        shares, home, takes = self._reserve_home()
        where: Any = NodeAffinitySchedulingStrategy(home, soft=False)
        if self._group is not None:
            where = PlacementGroupSchedulingStrategy(self._group, 0)
        actor = HeadActor.options(  # type: ignore[attr-defined]  # Ray's decorator adds it
            scheduling_strategy=where, **as_options(takes)
        )
        order = {"token": self._token, "workers": self._on_head, "awaited": sum(shares.values())}
        self._head = actor.remote(self._work, {**options, **order})
        self._address = self._head.address.remote()  # a reference, which Ray resolves for the agents
        self._asked = self._head.reports.remote(_LOOK_S)
        return shares

    def _reserve_home(self) -> tuple[dict[str, int], str, dict[str, float]]:
        """Find room, and reserve that of the head, which another job may take first: then look for room again.

        Returns:
            How many workers the other nodes get, the head's node, and what its workers take.

        Raises:
            ConfigError: There is too little room; see `_find_room`.
            SilenceError: Others have it, or took it each time.
        """
        while True:
            shares = self._find_room()
            home = next(iter(shares)) if self._needs["GPU"] else node_of_driver()
            self._on_head = shares.pop(home, 0)
            if not self._on_head:
                return shares, home, {}
            self._group, takes = self._reserve(home, self._on_head)
            if self._group.wait(_PLACING_S):
                return shares, home, takes
            remove_placement_group(self._group)
            self._group = None
            if time.monotonic() > self._begin + self._start_timeout_s:
                raise SilenceError(
                    f"the room that was found on node {home[:8]} went to others each time, for "
                    f"{self._start_timeout_s:g} s (start_timeout_s); ask for fewer workers, or wait until there is more"
                )

    def _reserve(self, node: str, count: int) -> tuple[PlacementGroup, dict[str, float]]:
        takes = {kind: amount * count for kind, amount in self._needs.items() if amount}
        bundle = takes or {"CPU": 0.001}
        return placement_group([bundle], bundle_label_selector=[{"ray.io/node-id": node}]), takes

    def _place(self, node: str, count: int) -> None:
        group, takes = self._reserve(node, count)
        actor = AgentActor.options(  # type: ignore[attr-defined]  # Ray's decorator adds it
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0), **as_options(takes)
        ).remote()
        over = actor.join.remote(self._address, count, self._token, self._work)
        self._placed.append(_Placed(node, count, group, actor, over))

    # ---- what happens ----

    def _turn(self) -> None:
        """Handle what the head and the agents have reported."""
        agents = {each.over: each for each in self._placed}
        ready, _ = ray.wait([*agents, self._asked], timeout=_LOOK_S)
        for reference in ready:
            if reference in agents:
                self._ended(agents[reference])
            else:
                self._hear()
        if time.monotonic() - self._looked_at > _NODES_S and self._code is None:
            self._looked_at = time.monotonic()
            self._check_begun()
            if not self._needs["GPU"] and not self._is_over:
                self._use_room()

    def _check_begun(self) -> None:
        """Check that the workers meet in time; the first step waits for those who may come, not for those lost.

        Raises:
            SilenceError: They do not.
        """
        if self._begun():
            return
        if not self._needs["GPU"]:  # said each time, since a head that is still starting does not hear it
            self._head.wait_for.remote(max(sum(each.count for each in self._placed), self._least - self._on_head))
        if time.monotonic() > self._deadline:
            raise SilenceError(
                f"the first workers did not start within {self._start_timeout_s:g} s: {self._least} were expected, and "
                f"{len(self._placed)} nodes have an agent; look at Ray's log, or raise start_timeout_s"
            )

    def _begun(self) -> bool:
        """Whether the workers have met."""
        self._has_begun = self._has_begun or self._of_head(self._head.has_begun.remote())
        return self._has_begun

    def _of_head(self, reference: Any) -> Any:
        """An answer of the head.

        Raises:
            PeerError: The head is lost.
        """
        try:
            return ray.get(reference)
        except RayError as error:
            raise PeerError(
                f"the head of the run is lost ({str(error).splitlines()[0]}), and with it everything since the last "
                "checkpoint; resume=True continues from there",
                0,
            ) from error

    def _hear(self) -> None:
        reports, self._code = self._of_head(self._asked)
        for report in reports:
            self._view.hear(report)
        if self._code is None:
            self._asked = self._head.reports.remote(_LOOK_S)

    def _ended(self, agent: _Placed) -> None:
        """Handle the end of an agent: the run is over, the head refused it, or it is lost."""
        self._placed.remove(agent)
        refused, said = False, "its actor or node is gone"
        with suppress(RayError):
            refused, said = ray.get(agent.over)
        agent.remove()
        if not said:
            self._is_over = True  # the head is about to say how it ended
            return
        if refused:
            self._refused.add(agent.node)
        if not self._begun():
            if refused:
                raise ConfigError(f"node {agent.node[:8]}: {said}")
            self._use_room()
        self._view.say(f"the agent on node {agent.node[:8]} has ended: {said}")

    def _use_room(self) -> None:
        """Place agents where there is room, for as many workers as are missing."""
        for stuck in [each for each in self._placed if each.is_stuck]:
            self._placed.remove(stuck)
            stuck.remove()
        missing = self._most - self._on_head - sum(each.count for each in self._placed)
        if missing <= 0:
            return
        nodes = {node: free for node, free in nodes_of_cluster().items() if node not in self._refused}
        shares = share_out([room_in(free, self._needs) for free in nodes.values()], 0, missing)
        for node, count in zip(nodes, shares, strict=True):
            if count:
                self._place(node, count)
