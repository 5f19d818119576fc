"""The state at rest: whether it is what the last step left, and the same on all sites.

Digests are made before a step that is computed twice: when the step before it has committed, when it begins, and before
it updates anything. The workers of a site share out the tensors; one number for all of them is compared, and only if
that differs are the single ones looked at. A site that differs copies the state from one that is right. Where there
is no other it takes back what has changed from its image, or from a checkpoint, if one is of this moment; else the run
stops: nothing doubtful is committed.
"""

from collections.abc import Mapping
from functools import reduce
from operator import xor

import torch
from torch import Tensor

from evenstep.core.checksum import checksums
from evenstep.core.errors import WrongError
from evenstep.engine.elements import first_difference
from evenstep.engine.holdings import Holdings
from evenstep.engine.place import place_of
from evenstep.engine.randomness import derive
from evenstep.plan.agreement import right_copy

__all__ = ["Custody"]


class Custody:
    """Looks after the state of one site. All workers must call everything here alike, unless it says otherwise.

    Args:
        holdings: What holds the state.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings, self._group, self._state = holdings, holdings.group, holdings.state
        self._noted: tuple[int, dict[str, int]] = -1, {}  # before which operation, and the digests that were right

    def note(self) -> None:
        """Remember what this worker's share of the state is now: an operation has just been committed. Asks nobody."""
        self._noted = self._state.operation + 1, self._digests()

    def _digests(self) -> dict[str, int]:
        """Of this worker's share of its site's tensors."""
        mine = self._state.sites.mine
        names = sorted(self._state.tensors())[mine.index(self._group.rank) :: len(mine)]
        tensors = [self._state.entries[name].live for name in names]
        found: dict[str, int] = {}
        for on_host in (True, False):  # the plain numbers of an optimizer lie on the host
            there = [n for n, t in enumerate(tensors) if (t.device.type == "cpu") == on_host]
            if there:
                numbers = checksums([tensors[n] for n in there])
                found |= {names[n]: number for n, number in zip(there, numbers, strict=True)}
        return found

    def check(self, where: str) -> bool:
        """Check that the state is what it was, and the same on all sites; repair it where that is possible.

        Args:
            where: The step, in words.

        Returns:
            Whether it was; if not, what was computed from it must be computed again.

        Raises:
            WrongError: It cannot be repaired.
        """
        now = self._digests()
        operation, digests = self._noted
        noted = digests if operation == self._state.operation else {}  # shares change with the workers
        changed = sorted(name for name, digest in now.items() if noted.get(name, digest) != digest)
        self._noted = self._state.operation, now | noted
        root = reduce(xor, (derive(name, digest) for name, digest in now.items()), 0)
        of_all = self._group.gather_json(where + "state", [root, changed])
        sites = self._state.sites.members
        roots = [reduce(xor, (of_all[rank][0] for rank in ranks)) for ranks in sites]
        sound = [not any(of_all[rank][1] for rank in ranks) for ranks in sites]
        if all(sound) and len(set(roots)) == 1:
            return True
        right = right_copy(roots, sound)
        if len(sites) == 1 and self._take_back(where, {name: noted[name] for name in changed}):
            return False
        if right is None or len(sites) == 1:
            raise WrongError(self._sentence(where, [of_all[rank][1] for ranks in sites for rank in ranks]))
        self._mend(where, now, roots.index(right), [n for n, root in enumerate(roots) if root != right])
        return False

    def _sentence(self, where: str, changed: list[list[str]]) -> str:
        places = self._group.gather_json(where + "places", place_of(self._holdings.memory.device))
        step = where.removesuffix(": ")
        for rank, names in enumerate(changed):
            if names:
                return (
                    f"at {step} '{names[0]}' is not what the step before left, and nobody else has it: the memory "
                    f"of worker {self._group.members[rank]} ({places[rank]}) has changed by itself, unless the script "
                    "changes it through .data (that belongs in run.edit). Nothing is committed; go on from the last "
                    "checkpoint, on another machine (--resume)"
                )
        return (
            f"at {step} the sites hold different states and there is no majority, so one of them has updated wrong and "
            f"nobody can say which ({'; '.join(places)}). Nothing is committed; go on from the last checkpoint, "
            "without one of them (--resume)"
        )

    def _mend(self, where: str, now: Mapping[str, int], source: int, wrong: list[int]) -> None:
        """Give sites that differ the state of one that is right, and say what differed."""
        sites = self._state.sites
        digests: dict[int, dict[str, int]] = {}
        of_all = self._group.gather_json(where + "digests", dict(now))
        for n in (source, *wrong):
            digests[n] = {name: digest for rank in sites.members[n] for name, digest in of_all[rank].items()}
        places = self._group.gather_json(where + "places", place_of(self._holdings.memory.device))
        for n in wrong:
            names = sorted(name for name in digests[source] if digests[n].get(name) != digests[source][name])
            entries = [self._state.entries[name] for name in names]
            here, there = sites.members[n][0], sites.members[source][0]
            tensor = entries[0].live if self._group.rank in (here, there) else None
            element = first_difference(
                self._group,
                where + "difference",
                tensor if self._group.rank == here else None,
                tensor if self._group.rank == there else None,
            )
            if self._group.rank == here:
                self._state.save(entries)
            self._state.spread(where + "state anew", entries, there)
            if self._group.rank == 0:
                self._tell_wrong(where, here, places, names, element, "it gets a new copy of the state")
        with torch.no_grad():
            self._state.pull()
        self._noted = self._state.operation, self._digests()

    def _take_back(self, where: str, mine: Mapping[str, int]) -> bool:
        """On the only site: put what has changed back from a copy of this moment, if there is one; say what it was.

        Args:
            where: The step, in words.
            mine: The digests that this worker's share of it had.
        """
        group, entries = self._group, self._state.entries
        of_all = group.gather_json(where + "as it was", dict(mine))
        wanted = {name: digest for theirs in of_all for name, digest in sorted(theirs.items())}
        source, found = self._find(wanted) if group.rank == 0 else (None, {})
        source = group.gather_json(where + "copies", source)[0]
        if source is None:
            return False
        name = next(iter(wanted))
        element = first_difference(
            group, where + "difference", entries[name].live if group.rank == 0 else None, found.get(name)
        )
        places = group.gather_json(where + "places", place_of(self._holdings.memory.device))
        with torch.no_grad():
            for each, tensor in found.items():
                entries[each].live.copy_(tensor)
            group.barrier(where + "taken back")
            self._state.pull()
        self._noted = self._state.operation, self._digests()
        if group.rank == 0:
            whose = next(rank for rank, theirs in enumerate(of_all) if name in theirs)
            self._tell_wrong(where, whose, places, list(wanted), element, f"it is taken back from {source}")
        return True

    def _find(self, wanted: Mapping[str, int]) -> tuple[str | None, dict[str, Tensor]]:
        """A copy of some tensors that has these digests, and in words where it lies."""
        state, image, saved = self._state, self._state.image, self._state.saved
        if image is not None:
            copies = {name: image.find(state.entries[name].live, state.operation) for name in wanted}
            if (found := _alike(copies, wanted)) is not None:
                return "the image on the host", found
        if saved is not None:
            tensors = saved(self._holdings.version)
            if (found := _alike({name: tensors.get(name) for name in wanted}, wanted)) is not None:
                return "the checkpoint of this step", found
        return None, {}

    def _tell_wrong(
        self, where: str, rank: int, places: list[str], names: list[str], element: object, remedy: str
    ) -> None:
        who = f"worker {self._group.members[rank]} ({places[rank]})"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        step = where.removesuffix(": ")
        self._group.say(f"at {step} {who} holds a wrong '{names[0]}'{more}: {element}; {remedy}")


def _alike(copies: Mapping[str, Tensor | None], wanted: Mapping[str, int]) -> dict[str, Tensor] | None:
    """Copies of all tensors, if each is there and has its digest."""
    found = {name: copy for name, copy in copies.items() if copy is not None}
    return found if dict(zip(found, checksums(list(found.values())), strict=True)) == wanted else None
