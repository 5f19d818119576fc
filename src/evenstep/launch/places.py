"""Which machine the worker of each place is on: numbers alone, without processes or connections."""

from collections.abc import Mapping

from evenstep.core.config import MAX_SHARDS

__all__ = ["RunPlaces"]


class RunPlaces:
    """The places of a run's workers, and the machine of each.

    Args:
        count: How many places the head has at first.
        head: The number of the head, which takes workers that fit nowhere else.
    """

    def __init__(self, count: int, head: int) -> None:
        self._count, self._head = count, head
        self._machine_of = dict.fromkeys(range(count), head)

    def machine_of(self, place: int, capacities: Mapping[int, int]) -> int:
        """The machine of a place; a new place, or one whose machine is gone, is put where there is room.

        Args:
            place: The place.
            capacities: How many workers each machine has offered, by its number.
        """
        if self._machine_of.get(place) not in capacities:
            held = list(self._machine_of.values())
            free = [number for number, capacity in sorted(capacities.items()) if held.count(number) < capacity]
            self._machine_of[place] = free[0] if free else self._head
        return self._machine_of[place]

    def known_machine_of(self, place: int) -> int | None:
        """The machine of a place, if it has one."""
        return self._machine_of.get(place)

    def on(self, machine: int) -> list[int]:
        """The places of a machine, in order."""
        return sorted(place for place, number in self._machine_of.items() if number == machine)

    def free(self, count: int) -> list[int]:
        """The first places that no machine has, at most `count`; those of the head's first workers stay its own."""
        taken = set(self._machine_of) | set(range(self._count))
        return [place for place in range(MAX_SHARDS) if place not in taken][:count]

    def give(self, machine: int, places: list[int]) -> None:
        """Give places to a machine that has joined."""
        self._machine_of |= dict.fromkeys(places, machine)

    def take(self, machine: int) -> list[int]:
        """Take all places from a machine that is lost; returns them in order."""
        places = self.on(machine)
        for place in places:
            del self._machine_of[place]
        return places
