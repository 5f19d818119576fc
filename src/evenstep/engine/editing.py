"""An edit of the state between steps: one worker carries it out, and it is committed for all, like a step."""

from collections.abc import Callable, Sequence
from typing import Any

from evenstep.engine.holdings import Holdings
from evenstep.engine.updates import Updates
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Operation

__all__ = ["edit"]


def edit(holdings: Holdings, updates: Updates, function: Callable[[], None], seed: int) -> None:
    """Let the first worker change parameters, buffers and optimizers; everyone has the result afterwards.

    All workers must call this alike; it waits for all of them.

    Args:
        holdings: What the workers hold together.
        updates: What becomes of the sums of a step; it may refuse changes of an optimizer's state.
        function: Makes the changes.
        seed: Seeds the random numbers that it draws.

    Raises:
        UnsupportedError: The updates do not allow the edit; nothing was changed.
    """
    group, models, optimizers = holdings.group, holdings.models, holdings.optimizers

    def attempt() -> Entry:
        group.barrier("edit begins")
        first = group.rank == 0
        mine = models.edit(function, seed, optimizers) if first else None
        changes = group.gather_json("edit ends", mine)[0]
        for prepared, (news, gone, _) in zip(optimizers, changes, strict=True):
            if news or gone:
                updates.refuse("edited optimizer")
            prepared.settle(news, {i for i, _, _ in news} if first else set())
        _spread(holdings, changes)
        if first:
            updates.edited()
        group.barrier("state moved")
        return Entry("edit", changes)

    def adopt(entry: Entry, took_part: bool) -> None:
        for prepared, changes in zip(optimizers, entry.value, strict=True):
            prepared.adopt_changes(changes, took_part)
        models.pull()
        holdings.settle()

    holdings.ledger.perform(Operation("edit", holdings.version), attempt, adopt)


def _spread(holdings: Holdings, changes: Sequence[Any]) -> None:
    """Give all sites what the first worker has edited."""
    state = holdings.state
    if state.sites.are_one:
        return
    entries = holdings.models.editable()
    for prepared, (news, _, _) in zip(holdings.optimizers, changes, strict=True):
        fresh = [entry for entry in prepared.kept.entries_of(news) if not entry.counts]
        entries += prepared.kept.committed() + fresh
    if state.sites.is_first and holdings.group.rank:
        state.save([entry for entry in entries if entry.counts])
    state.spread("edit", entries, 0)
