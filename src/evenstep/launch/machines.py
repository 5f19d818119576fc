"""The machines of a run: this one, which is the head, and those that have joined it.

Which worker is on which machine, how the machines of a generation reach each other, and which are lost. Without
`--listen` there is one machine, and no other can join.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Protocol

from evenstep.core.children import Children
from evenstep.exchange.generations import Generation
from evenstep.launch.breaks import Breaks
from evenstep.launch.connection import Lost, MachineConnection
from evenstep.launch.door import HeadDoor, Listen
from evenstep.launch.far import There
from evenstep.launch.job import Job
from evenstep.launch.likeness import difference, likeness
from evenstep.launch.machine import Hears, Here, RunMachine
from evenstep.launch.places import RunPlaces
from evenstep.launch.store import StoreProcess
from evenstep.transport.bridge import Bridging
from evenstep.transport.links import ALTERED, check_backend

__all__ = ["Decides", "Machines"]

_ENDING_S = 3.0  # closing a connection at once would drop what is not sent or not read yet


class Decides(Hears, Protocol):
    """Is told what happens on machines and to them, and decides what to do."""

    def room(self, count: int) -> str | None:
        """Why `count` more workers cannot join, in a sentence; None: they can."""

    def joined(self, machine: RunMachine, places: Sequence[int]) -> None:
        """A machine has joined; its workers can be started."""

    def lost(self, machine: RunMachine, places: Sequence[int], why: str) -> None:
        """A machine is lost, with the workers of these places."""


class Machines:
    """All machines of a run. A context manager.

    Args:
        here: This machine.
        job: What to run.
        decides: Decides what to do.
        say: Takes sentences for the user.

    Raises:
        ConfigError: The address to listen on cannot be used.

    Attributes:
        all: The machines by their numbers.
        workers_awaited: How many workers other machines must have offered before the first step.
    """

    def __init__(self, here: Here, job: Job, decides: Decides, say: Callable[[str], None]) -> None:
        self.here, self._job, self._decides, self._say = here, job, decides, say
        self._listen: Listen | None = job.listen
        self.all: dict[int, RunMachine] = {here.number: here}
        self._far: dict[int, There] = {}
        self._places = RunPlaces(job.num_workers, here.number)
        self._last: set[int] = set()  # the machines of the present generation
        self._numbers = here.number  # the last that was given
        self._breaks = Breaks(here.number)
        self._altered = -1  # the last generation in which a bridge altered data
        self.workers_awaited = self._listen.workers if self._listen is not None else 0
        self._stack = ExitStack()
        self._door: HeadDoor | None = None
        if self._listen is not None:
            check_backend(self._listen.between)
            self._likeness = likeness(job.script, job.shards)
            self._door = self._stack.enter_context(closing(HeadDoor(self._listen, self, say)))
            self._store = StoreProcess()
            self._stack.callback(lambda: self._store.close())

    @property
    def _children(self) -> Children:
        return self.here.children

    def __enter__(self) -> "Machines":
        if self._door is not None and self._listen is not None:
            self._children.watch(self._door.socket, self._door.accept)
            if self._listen.fd is None:
                self._say(
                    f"other machines can join: evenstep join {self._listen.host}:{self._door.port} -n N{self.missing}"
                )
        return self

    def __exit__(self, *_: object) -> None:
        for there in self._far.values():
            there.connection.close()
        self._stack.close()

    # ---- who is where ----

    def of(self, place: int) -> RunMachine:
        """The machine of a place; a new place is put where there is room."""
        capacities = {number: machine.capacity for number, machine in self.all.items()}
        return self.all[self._places.machine_of(place, capacities)]

    def number_of(self, place: int) -> int:
        """The number of a place's machine."""
        return self.of(place).number

    def places_of(self, machine: RunMachine) -> list[int]:
        """The places of a machine's workers."""
        return self._places.on(machine.number)

    @property
    def are_enough(self) -> bool:
        """Whether there are as many as the first step waits for."""
        if self._listen is None:
            return True
        offered = sum(there.capacity for there in self._far.values())
        return len(self.all) >= self._listen.machines and offered >= self.workers_awaited

    @property
    def missing(self) -> str:
        """What the first step still waits for, as the end of a sentence for the user."""
        if self._listen is None or len(self.all) >= self._listen.machines:
            return ""
        return f"; {len(self.all)} of {self._listen.machines} are here, and the first step waits for the others"

    def described(self, alive: Mapping[int, bool]) -> dict[str, Any]:
        """Machines and workers as JSON.

        Args:
            alive: The places that have a worker, each with whether it is a member.
        """
        return {
            "machines": [
                {"machine": number, "name": machine.name, "workers": self.places_of(machine)}
                for number, machine in self.all.items()
            ],
            "workers": [
                {
                    "worker": place,
                    "pid": machine.pid_of(place),
                    "member": is_member,
                    "machine": machine.number,
                    **machine.row_of(place),
                }
                for place, is_member in alive.items()
                for machine in [self.of(place)]
            ],
        }

    def describe(self, machine: RunMachine) -> str:
        """A machine's name for the user."""
        return f"machine {machine.number} ({machine.name})"

    # ---- newcomers; see `Arrival` ----

    def job(self) -> dict[str, Any]:
        """See `Arrival`."""
        job = self._job
        return {
            "script": str(job.script),
            "is_module": isinstance(job.script, str),
            "args": list(job.args),
            "shards": job.shards,
            "arithmetic": self._likeness["arithmetic"],
            "step_timeout_s": job.step_timeout_s,
            "resume": job.resume,
            "recheck": job.recheck,
            "tolerate_wrong": job.tolerate_wrong,
            "traced": job.trace is not None,
            "silence_s": self._listen.silence_s if self._listen is not None else None,
        }

    def admit(self, connection: MachineConnection, said: dict[str, Any]) -> str | None:
        """See `Arrival`."""
        name, count, theirs = said.get("name"), said.get("workers"), said.get("likeness")
        if not isinstance(name, str) or type(count) is not int or count < 1 or not isinstance(theirs, dict):
            return "it does not describe itself as expected; install the same version of evenstep on every machine"
        if (found := difference(theirs, self._likeness)) is not None:
            return f"{found}; all machines must be alike"
        places = self._places.free(count)
        if (why := self._decides.room(count)) is not None:
            return why
        self._numbers += 1
        there = There(self._numbers, name[:64], count, connection, self._decides)
        connection.send({"welcome": there.number, "name": self.here.name})
        self.all[there.number] = self._far[there.number] = there
        self._places.give(there.number, places)
        self._children.watch(connection, lambda: None)  # it is read in every turn
        self._decides.joined(there, places)
        return None

    # ---- every turn ----

    def turn(self, now: float) -> None:
        """Read from newcomers and machines, bring journals up to date, and find machines that are lost; never waits."""
        if self._door is not None:
            self._door.turn(now)
            if self._store.child.wait(0.0):  # existing bridges no longer need it; the next generation gets another
                self._store.close()
                self._store = StoreProcess()
        for there in list(self._far.values()):
            try:
                assert self._listen is not None, "machines join only where the head listens"
                there.turn(now, self._listen.silence_s)
            except Lost as error:
                self.lose(there, str(error))
                continue
            if there.journal is not None and self.here.committed > there.journal:
                there.bring(*self.here.journal(there.journal))

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be sent to a machine."""
        return any(there.connection.has_more for there in self._far.values())

    def lose(self, machine: RunMachine, why: str) -> None:
        """Give up a machine: nothing it says is read any more."""
        there = self._far.pop(machine.number, None)
        if there is None:
            return
        del self.all[machine.number]
        self._children.forget(there.connection)
        there.connection.close()
        self._decides.lost(there, self._places.take(there.number), why)

    def broke(self, generation: int, reporter: int, culprit: int, text: str) -> None:
        """A bridge broke. If that keeps happening, one of its two machines is given up."""
        other = self._places.known_machine_of(culprit)
        if reporter not in self.all or other is None or other not in self.all:
            return  # it broke because a machine was lost
        blamed = self._breaks.note(generation, reporter, other)
        if blamed is not None:
            self.lose(self.all[blamed], f"cannot be reached: {text}")

    def say_if_altered(self, generation: int, reporter: int, culprit: int, text: str) -> None:
        """Say so if a bridge broke because it alters data: once, even if the next generation has begun meanwhile."""
        other = self._places.known_machine_of(culprit)
        if ALTERED in text and generation != self._altered and reporter in self.all and other in self.all:
            self._altered = generation
            names = f"{self.describe(self.all[other])} and {self.describe(self.all[reporter])}"
            self._say(f"between {names} {ALTERED}; the step is done again")

    def committed(self) -> None:
        """A step is committed: whatever broke before, the run makes progress."""
        self._breaks.committed()

    # ---- generations ----

    def announce(self, generation: Generation) -> None:
        """Begin a generation on all machines; its members may be in any order."""
        members = sorted(generation.members, key=lambda place: (self.number_of(place), place))
        numbers = [self.number_of(place) for place in members]
        taking_part = sorted(set(numbers))
        weights = generation.weights
        if weights is not None:
            by_place = dict(zip(generation.members, weights, strict=True))
            weights = [by_place[place] for place in members]
        rounds = max(machine.round for machine in self.all.values()) + 1
        machines = numbers if self._listen is not None else []
        said = replace(generation, round=rounds, members=members, weights=weights, machines=machines)
        workers = [[place for place in members if self.number_of(place) == number] for number in taking_part]
        for number, machine in sorted(self.all.items()):
            if number not in taking_part:
                if any(self.number_of(place) == number for place in generation.dismissed):
                    machine.announce(said, None, lacks_state=False)  # or its dismissed workers would wait for ever
                else:
                    machine.leave_out()
                continue
            bridging = None
            if len(taking_part) > 1:
                bridging = self._bridging(machine, taking_part, workers)
            machine.announce(said, bridging, lacks_state=bool(self._last) and number not in self._last)
        self._last = set(taking_part)

    def _bridging(self, machine: RunMachine, machines: Sequence[int], workers: Sequence[Sequence[int]]) -> Bridging:
        assert self._listen is not None, "there are other machines only where the head listens"
        far = self._far
        way = next(iter(far.values())).connection.here  # an address of this machine that others can reach
        host = far[machine.number].connection.here if machine.number in far else way
        addresses = [far[number].connection.there if number in far else way for number in machines]
        return Bridging(
            machines.index(machine.number),
            workers,
            (host, self._store.port),
            addresses,
            self._listen.between,
            self._listen.silence_s,
        )

    def end(self, code: int) -> None:
        """Tell all machines that the run is over, and wait a little until they have heard it."""
        for there in self._far.values():
            there.end(code)
        deadline = time.monotonic() + _ENDING_S
        waiting = list(self._far.values())
        while waiting and time.monotonic() < deadline:
            waiting = [there for there in waiting if not there.connection.is_over()]
            time.sleep(0.005)
