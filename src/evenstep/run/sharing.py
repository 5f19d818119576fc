"""Operations that change no state: what one worker does for all, and what all compute of a batch for everyone."""

from collections.abc import Callable
from typing import Any

from evenstep.core.errors import MismatchError
from evenstep.data.batch import Batch
from evenstep.engine.reports import compare_contents
from evenstep.engine.step import Engine
from evenstep.exchange.journal import Entry
from evenstep.run.evaluation import call_parts, evaluating
from evenstep.run.saving import Perform
from evenstep.run.values import pack, unpack

__all__ = ["collect", "once"]


def once(engine: Engine, perform: Perform, function: Callable[[], Any]) -> Any:
    """See `Run.once`."""

    def attempt() -> Entry:
        engine.group.barrier("once begins")
        mine = pack(function(), "what run.once was given") if engine.group.rank == 0 else b""
        return Entry("once", blob=engine.group.from_one("once", 0, mine))

    return perform("once", attempt, lambda entry, _: unpack(entry.blob))


def collect(engine: Engine, perform: Perform, batch: Batch, function: Callable[[Any], Any]) -> list[Any]:
    """See `Run.collect`."""

    def attempt() -> Entry:
        with evaluating(engine.models.slots.modules):
            mine = call_parts(engine, batch, function)
        _compare(engine, batch)
        data = pack(list(mine.items()), "what the function gave run.collect")
        pieces = engine.group.gather_bytes("collect", data)
        return Entry("collect", [len(piece) for piece in pieces], b"".join(pieces))

    def adopt(entry: Entry, _: bool) -> list[Any]:
        found, place = {}, 0
        for size in entry.value:
            found.update(unpack(entry.blob[place : place + size]))
            place += size
        return [found[shard] for shard in sorted(found)]

    return perform("collect", attempt, adopt)


def _compare(engine: Engine, batch: Batch) -> None:
    """See that all workers have come with the same batch.

    Raises:
        MismatchError: They have not.
    """
    group = engine.group
    of_all = group.gather_json("collect (batch)", [batch.name, batch.sizes, batch.contents()])
    for worker, theirs in zip(group.members, of_all, strict=True):
        if theirs[:2] != of_all[0][:2]:
            raise MismatchError(
                f"worker {worker} collects from {theirs[0]} with parts of {theirs[1]} samples where worker "
                f"{group.members[0]} has {of_all[0][0]} with parts of {of_all[0][1]}: all workers must go through the "
                "same batches"
            )
    compare_contents(engine.version, [(w, theirs[2]) for w, theirs in zip(group.members, of_all, strict=True)])
