"""Whether a piece of a step is computed, or replayed from a graph that was captured when it was computed before.

A replay repeats launches: no Python runs, and the bits are those of computing. It is right only as long as Python would
do the same again. So a piece is captured after it was computed twice with everything visible unchanged (`guards.py`),
replayed only while that holds, and now and then computed both ways and compared. A piece that cannot be captured is
computed, and the user is told once.

This module decides; `Recorder` is what captures, on CUDA in `capture.py`.
"""

import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from evenstep.core.errors import NondeterminismError, UnsupportedError
from evenstep.core.octets import octets
from evenstep.engine.guards import Look, difference
from evenstep.engine.results import Reading

__all__ = ["Capturable", "Graphs", "Mode", "Products", "Recorder", "Recording", "Task"]

Mode = Literal["auto"] | bool
_WARM = 2  # how often a piece is computed before it is captured: kernels are chosen and compiled then
_MOST_GRAPHS = 16  # each holds memory of its own
_CHECKS = frozenset(8**n for n in range(12))  # at these replays of a graph the piece is computed too
_OURS = str(Path(__file__).parents[1])


@dataclass
class Products:
    """The results of a piece.

    Attributes:
        numbers: All numbers that its readings read, [n] in float64.
        readings: The result of each shard.
        gradients: For each shard, the gradient of every parameter; None where there is none.
        buffers: The buffers as shard 0 left them, if it was among the shards.
        join: Makes what is launched next wait for them, if they come on a stream of their own; until it is called,
            another piece may be launched, which runs at the same time.
    """

    numbers: Tensor
    readings: list[Reading]
    gradients: list[Sequence[Tensor | None]]
    buffers: dict[str, Tensor] | None = None
    join: Callable[[], None] | None = None


class Capturable(Protocol):
    """Forward and backward of some shards on given tensors.

    Attributes:
        products: Their results; the gradients only after backward.
        drew: Whether user code drew random numbers on the host.
        carried: Whether user code used a carry, or left a note.
    """

    @property
    def products(self) -> Products: ...  # noqa: D102  # an attribute, documented with the class

    @property
    def drew(self) -> bool: ...  # noqa: D102  # an attribute, documented with the class

    @property
    def carried(self) -> bool: ...  # noqa: D102  # an attribute, documented with the class

    def forward(self) -> None:
        """Go forward."""

    def backward(self) -> None:
        """Go backward."""


@dataclass(frozen=True)
class Task:
    """A piece to be done.

    Attributes:
        signature: What tells pieces apart: shapes, types, and which parameters are trained.
        inputs: The tensors of its parts.
        seeds: One for each shard.
        look: Gives what user code can see: as it was when the step began, or looked at again.
        piece: Makes the piece for given inputs and seeds; with generators of the device, one for each shard, instead
            of the seeds if it is captured.
        between: Called with the numbers of its results when forward has been launched.
        agree: Asks whether all workers that compute it together say yes; they must ask alike.
        is_one_of_many: Whether the step has more pieces on this device.
    """

    signature: Hashable
    inputs: Sequence[Tensor]
    seeds: Sequence[int]
    look: Callable[[bool], Look]
    piece: Callable[[Sequence[Tensor], Sequence[int], Sequence[torch.Generator] | None], Capturable]
    between: Callable[[Tensor], None]
    agree: Callable[[bool], bool] = bool
    is_one_of_many: bool = False


class Recording(Protocol):
    """A captured piece.

    Attributes:
        num_copies: How many graphs there are of it, replayed in turns.
        num_bytes: The memory that one of them holds, about as much as computing the piece takes.
    """

    num_copies: int
    num_bytes: int

    def replay(self, inputs: Sequence[Tensor], seeds: Sequence[int], between: Callable[[Tensor], None]) -> Products:
        """Run it again on other inputs with other random numbers. What it gives stays until `num_copies` replays later.

        Does not wait for the device, unless that has much to do already.
        """


class Recorder(Protocol):
    """Captures pieces."""

    def record(self, task: Task) -> Recording:
        """Capture a piece without computing it. Raises whatever prevented the capture."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether this much memory is free."""

    def release(self) -> None:
        """Give back the memory that computing a piece has left unused."""


@dataclass
class _Known:
    """A captured piece and how often it was replayed."""

    look: Look
    recording: Recording
    replays: int = 0


@dataclass
class _Signature:
    """What is known of the pieces of one signature."""

    computed: int = 0
    look: Look = field(default_factory=dict)
    known: list[_Known] = field(default_factory=list)


class Graphs:
    """Does tasks.

    Args:
        mode: "auto": capture what can be captured; True: what cannot is an error; False: capture nothing.
        recorder: Captures pieces.
        say: Called once with a sentence that says why something is not captured.
    """

    def __init__(self, mode: Mode, recorder: Recorder, say: Callable[[str], None]) -> None:
        self._mode, self._recorder, self._say = mode, recorder, say
        self._signatures: dict[Hashable, _Signature] = {}
        self.off: str | None = None if mode else "graphs=False"

    def run(self, task: Task) -> Products:
        """Compute or replay a piece.

        Raises:
            UnsupportedError: It cannot be captured, and the mode is True.
            NondeterminismError: A replay gave other bits than computing does.
        """
        if self.off is not None:
            return self.compute(task).products
        found, look = self._signatures.setdefault(task.signature, _Signature()), task.look(False)
        for known in found.known:
            if difference(known.look, look) is None:
                return self._replay(known, task)
        if found.computed >= _WARM and (changed := difference(found.look, look)) is None:
            return self._capture(found, look, task)
        if found.computed >= _WARM and changed is not None and len(found.known) + 1 >= _MOST_GRAPHS // 2:
            self._give_up(changed)
        found.computed = found.computed + 1 if difference(found.look, look) is None else 1
        found.look = look
        piece = self.compute(task)
        reason = _cannot_replay(piece, look, task)
        if reason is not None:
            self._give_up(reason)
        return piece.products

    def forget(self) -> None:
        """Drop all graphs."""
        self._signatures.clear()

    def compute(self, task: Task) -> Capturable:
        """Compute a piece."""
        piece = task.piece(task.inputs, task.seeds, None)
        piece.forward()
        task.between(piece.products.numbers)
        piece.backward()
        return piece

    def _capture(self, found: _Signature, look: Look, task: Task) -> Products:
        if sum(len(each.known) for each in self._signatures.values()) >= _MOST_GRAPHS:
            self._give_up(f"its parts have come in more than {_MOST_GRAPHS} shapes; pad them to a few")
            return self.compute(task).products
        recording, reason = None, "another worker could not capture it"
        try:
            recording = self._recorder.record(task)
        except Exception as error:  # noqa: BLE001  # whatever it was, the piece can be computed, and the user is told
            reason = _reason(error)
        if not task.agree(recording is not None) or recording is None:
            self._give_up(reason)
            return self.compute(task).products
        found.known.append(known := _Known(look, recording))
        return self._replay(known, task)

    def _replay(self, known: _Known, task: Task) -> Products:
        known.replays += 1
        products = known.recording.replay(task.inputs, task.seeds, task.between)
        is_checked = known.replays in _CHECKS or known.replays <= known.recording.num_copies
        if is_checked and task.agree(self._recorder.has_room(known.recording.num_bytes)):
            return self._check(known, task, products)
        return products

    def _check(self, known: _Known, task: Task, products: Products) -> Products:
        """Compute a piece that was just replayed, and compare: dependencies that the guards cannot see show here."""
        if products.join is not None:
            products.join()
        replayed, computed = _bits(products), self.compute(task).products
        if not _equal(replayed, _bits(computed)):
            if known.replays > known.recording.num_copies:
                raise NondeterminismError(
                    f"the step function gave other bits than its graph after {known.replays} replays: it depends on "
                    "something that evenstep cannot see, or is not deterministic; use Run(graphs=False) and train "
                    "again from before"
                )
            self._give_up("a replay gave other bits than computing")
        self._recorder.release()  # the graph holds as much, and computing ended long ago
        return computed

    def _give_up(self, reason: str) -> None:
        if self._mode is True:
            raise UnsupportedError(f"the step function cannot be captured as a CUDA graph: {reason}")
        if self.off is None:
            self._say(f"steps are computed without CUDA graphs, which is slower: {reason}")
        self.off = reason
        self._signatures.clear()


def _bits(products: Products) -> list[Tensor | None]:
    tensors = [products.numbers, *(g for shard in products.gradients for g in shard)]
    return [None if t is None else t.clone() for t in [*tensors, *(products.buffers or {}).values()]]


def _equal(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    return len(one) == len(other) and all(
        (a is None) == (b is None) and (a is None or b is None or _same_bytes(a, b))
        for a, b in zip(one, other, strict=True)
    )


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(octets(a), octets(b))


def _cannot_replay(piece: Capturable, before: Look, task: Task) -> str | None:
    """Why replays of a piece that was just computed would not do what computing it does; None: they would."""
    if piece.drew:
        return "it draws random numbers on the host, and a replay would repeat them"
    if piece.carried:
        return "it uses a run.carry or a Note, and a replay would hand on that of the capture"
    effect = difference(before, task.look(True))
    return None if effect is None else f"it changes what it can see: {effect}"


def _reason(error: BaseException) -> str:
    """What prevented the capture of a piece, and in which line of the user's code."""
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {text[0] if text else 'no reason given'}"
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if "torch" not in Path(frame.filename).parts and not frame.filename.startswith(_OURS):
            return f"{said} (at {frame.filename}, line {frame.lineno}: {frame.line})"
    return said
