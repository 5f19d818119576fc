"""What a node is told to run, and what comes of it: plain values, and the judgement over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from evenstep.core.errors import ConfigError, PeerError, SilenceError

__all__ = ["End", "Kind", "Order", "Verdict", "compare_nodes", "judge", "share_out"]


@dataclass(frozen=True)
class Order:
    """Workers to start on a node, for one attempt at a run.

    Attributes:
        script: The training script; a name without ".py" at its end is that of a module.
        args: Its arguments.
        workers: The numbers of this node's workers.
        num_workers: How many there are on all nodes.
        host: Where worker 0 is to be found.
        port: And where it listens.
        resume: Whether to go on from the newest checkpoint.
        shards: Parts of every batch; None: the script's.
        step_timeout_s: How long any wait for another worker may take; None: the script's.
    """

    script: str
    args: tuple[str, ...]
    workers: tuple[int, ...]
    num_workers: int
    host: str
    port: int
    resume: bool = False
    shards: int | None = None
    step_timeout_s: float | None = None

    def with_script(self, script: str, args: tuple[str, ...]) -> "Order":
        """The same order for another script."""
        return replace(self, script=script, args=args)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Order":
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        return cls(**{**fields, "args": tuple(fields["args"]), "workers": tuple(fields["workers"])})


@dataclass(frozen=True)
class End:
    """How a worker ended.

    Attributes:
        worker: Its number.
        code: Its exit code, or minus the signal that killed it.
        how: The same in words.
        error: What it said of its own end.
    """

    worker: int
    code: int
    how: str
    error: str | None = None


class Kind(Enum):
    """What an attempt came to: all done, the script at fault, or workers lost."""

    DONE = "done"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True)
class Verdict:
    """What an attempt came to.

    Attributes:
        kind: In a word.
        text: The error, or who was lost.
        code: The exit code that belongs to it.
    """

    kind: Kind
    text: str = ""
    code: int = 0
    ends: tuple[End, ...] = field(default=(), compare=False)


def judge(ends: Sequence[End]) -> Verdict:
    """What an attempt came to, from the ends of all workers whose nodes are still there.

    A worker that has heard nothing from the others for too long is not at fault: somebody is lost.
    """
    ends = tuple(ends)
    said = [end for end in ends if end.code not in (0, SilenceError.exit_code) and end.error]
    if said:
        return Verdict(Kind.FAILED, said[0].error or "", said[0].code, ends)
    lost = [end for end in ends if end.code and end.code != PeerError.exit_code]
    if not lost:
        lost = [end for end in ends if end.code]
    if lost:
        return Verdict(Kind.LOST, ", ".join(end.how for end in lost), lost[0].code, ends)
    return Verdict(Kind.DONE, ends=ends)


def compare_nodes(facts: Sequence[dict[str, str]]) -> None:
    """See that all nodes have the same versions.

    Args:
        facts: Of every node: its name under "node", and what must be alike.

    Raises:
        ConfigError: They differ.
    """
    first = facts[0]
    for other in facts[1:]:
        for name in first.keys() - {"node"}:
            if other.get(name) != first[name]:
                raise ConfigError(
                    f"node {other['node']} has {name} {other.get(name)} but node {first['node']} has {first[name]}; "
                    "all nodes need the same: the bits rest on it"
                )


def share_out(capacities: Sequence[int], least: int, most: int) -> list[int]:
    """How many workers each node gets: as many as there is room for, up to `most`, on as few nodes as possible.

    Raises:
        ConfigError: There is not even room for `least`.
    """
    if sum(capacities) < least:
        raise ConfigError(f"there is room for {sum(capacities)} workers, expected at least {least}")
    left, shares = most, [0] * len(capacities)
    for node in sorted(range(len(capacities)), key=lambda node: (-capacities[node], node)):
        shares[node] = min(capacities[node], left)
        left -= shares[node]
    return shares
