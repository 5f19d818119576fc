"""The test kit for process groups: bodies on several ranks, on one machine or on what looks like several."""

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import evenstep.distributed
import processes
from evenstep.core.errors import EvenstepError
from evenstep.distributed import members
from evenstep.plan import tree
from workers import Outcome, WorkersFailed, run_outcomes

__all__ = ["EVENSTEP", "run_rank_outcomes", "run_ranks", "same", "until_it_fails", "until_it_waits", "values"]

EVENSTEP = evenstep.distributed.__name__


def run_ranks(num_ranks: int, body: Callable[[int], Any], **options: Any) -> list[Any]:
    """Run `body(rank)` on so many ranks of a process group; return what they returned, in rank order.

    Args:
        num_ranks: How many processes to fork.
        body: Called in each with its rank, between init and destroy.
        options: See `run_rank_outcomes`.

    Raises:
        WorkersFailed: A rank raised, exited or was killed.
    """
    outcomes = run_rank_outcomes(num_ranks, body, **options)
    if any(outcome.kind for outcome in outcomes):
        raise WorkersFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def run_rank_outcomes(
    num_ranks: int,
    body: Callable[[int], Any],
    *,
    backend: str = "evenstep",
    timeout_s: float = 30.0,
    machine_of: Callable[[int], int] | None = None,
) -> list[Outcome]:
    """As `run_ranks`, but say how each ended.

    Args:
        num_ranks: How many processes to fork.
        body: Called in each with its rank.
        backend: The backend of the default group.
        timeout_s: The timeout of the default group.
        machine_of: Which machine a rank is to believe that it is on; ranks of two machines share no memory.
    """
    with tempfile.TemporaryDirectory() as folder:

        def rank_body(rank: int) -> Any:
            if machine_of is not None:
                pretend(machine_of, rank)
            store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s)
            )
            try:
                return body(rank)
            finally:
                dist.destroy_process_group()

        return run_outcomes(num_ranks, rank_body)


def pretend(machine_of: Callable[[int], int], rank: int) -> None:
    """Let the trial of shared memory fail for ranks of another machine."""
    really = members._shares_memory
    members._shares_memory = lambda member: machine_of(member.name) == machine_of(rank) and really(member)


def until_it_waits(rank: int, awaited: list[int]) -> None:
    """Wait until a rank waits for some others, in a collective or for a message."""
    team = dist.group.WORLD._ranks._team
    assert processes.until(lambda: list(team._awaited_by(rank)) == awaited), f"rank {rank} waits for others"


def until_it_fails() -> None:
    """Wait until the group has failed, whatever this rank would have done."""
    try:
        while True:
            dist.group.WORLD._ranks.check()
            time.sleep(0.01)
    except EvenstepError:
        pass


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values of any dtype, small enough that products of a few of them stay finite."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every byte."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    found, expected = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (found, expected))
    return torch.equal(found, expected)


def reduced(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """What torch, in one process, gives for a reduction in the fixed tree order."""
    if parts[0].dtype == torch.bool:
        op = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR"}.get(op, op)
    pairs = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    total = tree.reduce(parts, pairs[op])
    if op == "AVG":
        numbers = torch.view_as_real(total) if total.is_complex() else total
        numbers.div_(len(parts), rounding_mode=None if numbers.is_floating_point() else "trunc")
    return total
