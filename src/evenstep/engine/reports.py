"""What workers tell each other when their backward is over: what each has done in the step, and the results."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from evenstep.core.errors import MismatchError, NondeterminismError
from evenstep.engine.circumstances import REMEDY
from evenstep.engine.results import ShardResult

__all__ = ["UNSTEADY", "Report", "compare", "compare_contents", "compare_facts"]

UNSTEADY = "another one when it is drawn again"
"""Among contents: of a sample that depends on more than its index and its seed."""

_OF_BATCH = ("batch", "samples", "optimizer")


@dataclass(frozen=True)
class Report:
    """The report of one worker.

    Attributes:
        worker: Which worker.
        facts: What must be the same on all workers, by name.
        contents: What must be the same in their batches, by path; where each has loaded its own part, a few samples
            in some steps.
        results: The results of its shards.
        busy_s: How long it computed, without its waits.
        buffers: With several sites: the buffers changed by the shard whose buffers it keeps for its site, if any.
        logged: What its script has logged since the last step, by name.
    """

    worker: int
    facts: dict[str, Any]
    contents: dict[str, str]
    results: dict[int, ShardResult]
    busy_s: float
    buffers: Sequence[str] = ()
    logged: dict[str, list[float]] = field(default_factory=dict)

    def pack(self) -> list[Any]:
        """As JSON."""
        results = {str(shard): result.pack() for shard, result in self.results.items()}
        logged = {name: [v if isfinite(v) else repr(v) for v in values] for name, values in self.logged.items()}
        return [self.worker, self.facts, self.contents, results, self.busy_s, list(self.buffers), logged]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> "Report":
        """The inverse of `pack`."""
        worker, facts, contents, results, busy_s, buffers, logged = packed
        by_shard = {int(shard): ShardResult.unpack(result) for shard, result in results.items()}
        values = {name: [float(value) for value in logged[name]] for name in logged}
        return cls(worker, facts, contents, by_shard, busy_s, tuple(buffers), values)


def compare(version: int, reports: Sequence[Report], *, strict: bool = True) -> None:
    """Check that all workers do the same step; see `compare_contents`.

    Raises:
        MismatchError: They do not. All workers see the same reports, so all raise alike.
        NondeterminismError: They have different data.
    """
    compare_facts(f"step {version}", [(report.worker, report.facts) for report in reports])
    compare_contents(version, [(report.worker, report.contents) for report in reports], strict=strict)


def compare_facts(what: str, of_workers: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Check that all workers do something under the same circumstances.

    Args:
        what: What they do, in words.
        of_workers: Workers, and what must be the same on them, by name, as far as each knows it.

    Raises:
        MismatchError: They do not.
    """
    first, known = of_workers[0]
    for worker, facts in of_workers:
        for key, value in facts.items():
            if repr(value) != repr(expected := known.get(key, value)):  # a NaN is not equal to itself
                why = "" if key in _OF_BATCH else f"; {REMEDY}"
                raise MismatchError(
                    f"in {what} worker {worker} has {key} {value} but worker {first} has {expected}: all workers must "
                    f"do the same{' step' if what.startswith('step') else ''}{why}"
                )


def compare_contents(version: int, of_workers: Sequence[tuple[int, Mapping[str, str]]], *, strict: bool = True) -> None:
    """Check that all workers have the same batch, or the same samples where each loads its own.

    Args:
        version: The version that the step reads.
        of_workers: Workers, and the contents of their batches.
        strict: Whether samples that differ are an error; otherwise a warning.

    Raises:
        MismatchError: They have another batch.
        NondeterminismError: They have other samples, or samples that change.
    """
    unsteady = next((path for _, found in of_workers for path, what in found.items() if what == UNSTEADY), None)
    if unsteady is not None:
        _say(
            f"{unsteady} is {UNSTEADY}, with the same seed, so it depends on what was drawn before, and with it on the "
            "number of workers: in __getitem__ and collate_fn draw from torch, np.random or random, which are seeded "
            "for every sample, not from a generator of your own, and change nothing there",
            strict=strict,
        )
        return
    (first, expected), *others = of_workers
    for worker, found in others:
        for where in [*expected, *found]:
            here, there = expected.get(where, "nothing"), found.get(where, "nothing")
            if here == there:
                continue
            if not where.startswith("sample"):
                raise MismatchError(
                    f"in step {version} worker {worker} came with another batch than worker {first}: {where} is "
                    f"{there}, not {here} (type, shape, checksum), but run.step takes the whole global batch, the same "
                    "on every worker. The usual cause is a branch that only one worker takes and that draws random "
                    "numbers, such as `if run.worker == 0: evaluate()`: let every worker take it, or draw batches from "
                    "a torch.Generator of their own"
                )
            text = (
                f"workers {first} and {worker} have different data: {where} is {here} on one and {there} on the other "
                "(type, shape, checksum). Each loads the samples of its own shards, so all must find the same samples "
                "in the same order: sort what a directory or a set gives, make the data set after Run(...), which "
                "seeds torch, NumPy and random, draw from no generator of your own in __getitem__, and have the same "
                "files on every machine"
            )
            _say(text, strict=strict)
            return


def _say(text: str, *, strict: bool) -> None:
    if strict:
        raise NondeterminismError(f"{text}; Run(on_nondeterminism='warn') goes on anyway")
    warnings.warn(text, stacklevel=3)
