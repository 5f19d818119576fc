"""Operations that change no state: what one does for all, what all compute for a batch, and sums over shards."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError, MismatchError, UnsupportedError
from evenstep.core.octets import octets
from evenstep.data.batch import Batch
from evenstep.engine.randomness import derive, preserved, seed_all
from evenstep.engine.reports import compare_contents
from evenstep.engine.step import Engine
from evenstep.exchange.group import SUMMABLE, Group
from evenstep.exchange.journal import Entry
from evenstep.run.evaluation import call_parts, evaluating
from evenstep.run.saving import Perform
from evenstep.run.values import pack, unpack

__all__ = ["collect", "exchange", "once"]

Rows = Tensor | Callable[[int], Tensor]


def once(engine: Engine, perform: Perform, function: Callable[[], Any]) -> Any:
    """See `Run.once`."""

    def attempt() -> Entry:
        engine.group.barrier("once begins")
        mine = b""
        if engine.group.rank == 0:
            with preserved():  # what one worker draws, the others do not
                seed_all(derive("once", engine.config.seed, engine.ledger.done))
                mine = pack(function(), "what run.once was given")
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
    """Check that all workers have the same batch.

    Raises:
        MismatchError: They do not.
        NondeterminismError: They have different data.
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
    contents = [(worker, theirs[2]) for worker, theirs in zip(group.members, of_all, strict=True)]
    compare_contents(engine.version, contents, strict=engine.config.on_nondeterminism == "error")


def exchange(engine: Engine, perform: Perform, tag: str, rows: Rows) -> Tensor:
    """See `Run.exchange`."""
    group, sharing = engine.group, engine.sharing
    generation, kind, total = group.generation, f"exchange {tag}", torch.empty(0)

    def attempt() -> Entry:
        nonlocal total
        if callable(rows):
            mine = _call(engine, rows)
        elif group.generation == generation:
            mine = rows
        else:
            raise UnsupportedError(
                f"the workers changed before exchange('{tag}') was over, and the rows of the shards that moved are "
                "not here; pass a function of the shard instead of a tensor"
            )
        if sharing.mine:
            _check_rows(engine, mine)
        if group.keeper:  # it has no row to show what rows are like
            mine = _like_others(group, tag, mine)
        shares = [end - first for first, end in sharing.spans]
        total = group.sum(tag, mine.cpu(), shares, everyone=True).to(mine.device)
        described = [str(total.dtype).removeprefix("torch."), str(total.device)]
        return Entry(kind, described, octets(total.cpu()).numpy().tobytes())

    def adopt(entry: Entry, took_part: bool) -> Tensor:
        if took_part:
            return total
        dtype, device = entry.value
        return torch.frombuffer(bytearray(entry.blob), dtype=getattr(torch, dtype)).to(device)

    return perform(kind, attempt, adopt)


def _call(engine: Engine, rows: Callable[[int], Tensor]) -> Tensor:
    """What the shards of this worker offer, each with random numbers of its own."""
    found = []
    with preserved():
        for shard in engine.sharing.mine:
            seed_all(derive("exchange", engine.config.seed, engine.ledger.done, shard))
            found.append(rows(shard))
    return torch.stack(found) if found else torch.empty(0, 0)


def _like_others(group: Group, tag: str, rows: Tensor) -> Tensor:
    """The rows of this worker; if it has none, none of the others' width and type."""
    described = [str(rows.dtype).removeprefix("torch."), rows.shape[1]] if len(rows) else None
    found = group.gather_json(f"{tag}: rows", described)
    dtype, width = next(each for each in found if each is not None)
    return rows if len(rows) else torch.empty((0, width), dtype=getattr(torch, dtype))


def _check_rows(engine: Engine, rows: Tensor) -> None:
    num_shards = len(engine.sharing.mine)
    if rows.ndim != 2 or len(rows) != num_shards:
        raise ConfigError(
            f"exchange got {tuple(rows.shape)}, expected ({num_shards}, n): one row for each shard of worker "
            f"{engine.group.worker}"
        )
    if rows.dtype not in SUMMABLE or not rows.numel():
        raise ConfigError(f"exchange got {rows.dtype} {tuple(rows.shape)}; expected at least one of {SUMMABLE}")
