"""Goes through every order in which the actions of a model can happen, and shows the shortest way to what is wrong."""

import gc
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = ["Event", "Model", "Outcome", "Violation", "check"]

Event = tuple[str, int]
"""What happens, and to whom."""

FAULTS = ("killed", "stopped", "cut")
"""Events that need not happen: a run must come to its end without any more of them."""


class Violation(Exception):
    """The protocol broke a promise."""


class Model(Protocol):
    """What can be checked. States are values."""

    def initial(self) -> Hashable:
        """Where it begins."""

    def moves(self, s: Any) -> Iterator[tuple[Event, Any]]:
        """What can happen next, and what it leads to: a state, or a `Violation`; the same state if it has to wait."""

    def step(self, s: Any, i: int) -> tuple[Event, Any]:
        """The next action of one participant."""

    def unseen(self, s: Any) -> int | None:
        """A participant whose next action nobody can see or hinder, so that no other order need be tried."""

    def invariant(self, s: Any) -> None:
        """Raise a `Violation` if something does not hold that holds in every state."""

    def terminal(self, s: Any) -> bool:
        """Whether it is over. Raises a `Violation` if it should not be."""

    def describe(self, s: Any, event: Event) -> str:
        """An event in words."""

    def brief(self, s: Any) -> str:
        """A state in words."""


@dataclass
class Outcome:
    """What the checker found.

    Attributes:
        states: How many states there are.
        terminals: How many of them are the end of a run.
        violation: What is wrong, if anything.
        trace: What happened until then, in the fewest actions.
        seconds: How long it took.
    """

    states: int
    terminals: int
    violation: str | None = None
    trace: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:2}. {label}" for number, label in enumerate(self.trace, 1))
        return f"{steps}\n  => {self.violation}" if self.violation else f"{self.states} states, nothing wrong"


class _Graph:
    """All states found so far, by number, each with the first way to it and the ways on that kill nobody."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.states = [model.initial()]
        self.number = {self.states[0]: 0}
        self.came_from: list[tuple[int, Event]] = [(0, ("step", 0))]
        self.onward: list[list[int]] = []

    def add(self, state: Any, source: int, event: Event) -> int:
        found = self.number.setdefault(state, len(self.states))
        if found == len(self.states):
            self.states.append(state)
            self.came_from.append((source, event))
        return found

    def trace(self, number: int) -> list[str]:
        labels = []
        while number:
            number, event = self.came_from[number]
            labels.append(self.model.describe(self.states[number], event))
        return labels[::-1]


def check(model: Model, *, all_orders: bool = False) -> Outcome:
    """Go through all states, breadth first, until one is wrong or there are no more.

    A state is wrong if an invariant or an action says so, or if nothing can happen in it though the run is not over.
    When there are no more, it also sees that nothing goes round in a circle: without further deaths every order of
    events comes to an end, and since no state is stuck, that is the end of a run with all operations done.

    Args:
        model: Whose.
        all_orders: Try all orders even of actions that nobody can see. Without, the same is found in fewer states.
    """
    began = time.monotonic()
    graph = _Graph(model)
    collects_garbage = gc.isenabled()
    gc.disable()  # there is none, and looking for it takes half of the time
    try:
        violation, trace, terminals = _explore(graph, all_orders)
    finally:
        if collects_garbage:
            gc.enable()
    return Outcome(len(graph.states), terminals, violation, trace, time.monotonic() - began)


def _explore(graph: _Graph, all_orders: bool) -> tuple[str | None, list[str], int]:
    """What is wrong, the way there, and how many terminal states there are."""
    model, number, terminals = graph.model, 0, 0
    while number < len(graph.states):
        state = graph.states[number]
        try:
            model.invariant(state)
            terminal = model.terminal(state)
        except Violation as violation:
            return str(violation), graph.trace(number), terminals
        alone = None if all_orders else model.unseen(state)
        onward = []
        for event, after in model.moves(state) if alone is None else [model.step(state, alone)]:
            if isinstance(after, Violation):
                return str(after), [*graph.trace(number), model.describe(state, event)], terminals
            if after is state:
                continue  # it waits
            target = graph.add(after, number, event)
            if event[0] not in FAULTS:
                onward.append(target)
        if not onward and not terminal:
            return f"nothing can happen any more: {model.brief(state)}", graph.trace(number), terminals
        graph.onward.append(onward)
        terminals += terminal
        number += 1
    circle = _in_a_circle(graph.onward)
    if circle is not None:
        return "from here it can go round for ever", graph.trace(circle), terminals
    return None, [], terminals


def _in_a_circle(onward: list[list[int]]) -> int | None:
    """A state on a circle, or before which there is one; None if there is none."""
    before = [0] * len(onward)
    for targets in onward:
        for target in targets:
            before[target] += 1
    ready = [number for number, count in enumerate(before) if not count]
    while ready:
        for target in onward[ready.pop()]:
            before[target] -= 1
            if not before[target]:
                ready.append(target)
    return next((number for number, count in enumerate(before) if count), None)
