"""How the supervisor says who the workers are: it posts every generation in its own slot of the segment."""

import json
from dataclasses import asdict, dataclass, field

import torch

from evenstep.native import core
from evenstep.transport.segment import Segment

__all__ = ["Generation", "announce", "latest", "wait"]

_TAG = "generation"
_BYTES = 16384


@dataclass(frozen=True)
class Generation:
    """Who the workers are until one of them fails or others are to join.

    Attributes:
        number: Counted from 1.
        round: Every exchange of this generation has a higher number, every earlier one at most this.
        members: The workers, in order.
        weights: How much each is to do; None: equally much.
        dismissed: Former workers that are to leave.
        machines: On which machine each member is; members of one are neighbours. Number 0 is the head, where files are
            written. Empty: all on one.
        keeper: The first member is to keep the state and compute no shard, unless it is the only one.
    """

    number: int
    round: int
    members: list[int]
    weights: list[float] | None
    dismissed: list[int] = field(default_factory=list)
    machines: list[int] = field(default_factory=list)
    keeper: bool = False


def announce(segment: Segment, generation: Generation) -> None:
    """Begin a generation. Only for the supervisor, once members of the last one wait for nothing but this."""
    text = json.dumps(asdict(generation)).encode().ljust(_BYTES)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    core.clear_abort(segment.base)
    core.post(segment.base, segment.num_workers, generation.number << 32, _TAG, data.data_ptr(), _BYTES)


def latest(segment: Segment) -> int:
    """The number of the generation that was announced last; 0 before the first."""
    return core.last_post(segment.base, segment.num_workers)[0] >> 32


def wait(segment: Segment, after: int, timeout_ns: int) -> Generation | None:
    """The first generation after `after` that can still be read; None if there is none within the timeout."""
    data = torch.empty(_BYTES, dtype=torch.uint8)
    while True:
        seq = max(after + 1, latest(segment)) << 32
        rc = core.collect(segment.base, segment.num_workers, seq, _TAG, data.data_ptr(), _BYTES, 0, timeout_ns)
        if rc == core.ES_OK:
            return Generation(**json.loads(data.numpy().tobytes()))
        if rc != core.ES_MISMATCH:  # another generation was posted meanwhile
            return None
