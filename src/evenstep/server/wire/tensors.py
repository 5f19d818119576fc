"""Tensors on the wire: the safetensors format, read without trust and without a copy.

A message's tensors are a *head* (eight bytes of length, then JSON that gives every tensor its name, dtype, shape and
place) and the data. The head is read and checked first: against itself here, against the parameters by
`ParameterLayout`. Only then is memory taken for the data, and exactly as much as was announced. No pickle anywhere.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.core.octets import octets
from evenstep.server.wire.text import read_json, write_json

__all__ = [
    "DTYPES",
    "INDICES",
    "KEPT_BYTES",
    "LENGTH_BYTES",
    "MAX_HEAD_BYTES",
    "VALUES",
    "ParameterLayout",
    "Sender",
    "Spec",
    "TensorHead",
    "bytes_of",
    "encode",
    "fresh",
    "head_length",
]

LENGTH_BYTES = 8
MAX_HEAD_BYTES = 8 << 20
_MAX_TENSORS = 1 << 17
_MAX_DIMENSIONS = 64
_PAGES_BYTES = 1 << 20
KEPT_BYTES = 1 << 20  # how much memory may be kept for the next message
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDICES, VALUES = "#indices", "#values"
"""The endings of the names of top-k values."""

_IN_NUMPY = frozenset(DTYPES.values()) - {torch.bfloat16, torch.complex64}


@dataclass(frozen=True)
class Spec:
    """The dtype and shape of a tensor, known before its data."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes it takes."""
        return self.num_elements * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        """The spec of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @classmethod
    def parse(cls, name: str, dtype: Any, shape: Any) -> "Spec":
        """The spec in an untrusted description.

        Raises:
            RefusedError: There is no such dtype, or the shape is not one.
        """
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise RefusedError(
                f"tensor '{name[:200]}' has dtype {str(dtype)[:40]!r}, expected one of {', '.join(DTYPES)}"
            )
        if not _sizes(shape) or len(shape) > _MAX_DIMENSIONS:
            raise RefusedError(f"tensor '{name[:200]}' has a bad shape, expected a list of sizes")
        return cls(DTYPES[dtype], tuple(shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class TensorHead:
    """The checked head of a message.

    Attributes:
        specs: The specs of the tensors, in the order of their places.
        offsets: Where each begins in the data.
        data_bytes: The size of the data.
    """

    specs: Mapping[str, Spec]
    offsets: Mapping[str, int]
    data_bytes: int

    @classmethod
    def parse(cls, text: bytes | bytearray | memoryview, data_bytes: int) -> "TensorHead":
        """Read the JSON of a head.

        Args:
            text: The JSON, without its length.
            data_bytes: How many bytes of data follow.

        Raises:
            RefusedError: It is not a safetensors head, or does not describe exactly that many bytes.
        """
        return _parse(bytes(text), data_bytes)

    @classmethod
    def read(cls, text: bytes, data_bytes: int) -> "TensorHead":
        """As `parse`, but not cached."""
        value = read_json(text, "the head of the tensors")
        value.pop("__metadata__", None)
        if len(value) > _MAX_TENSORS:
            raise RefusedError(f"{len(value)} tensors in one message, expected at most {_MAX_TENSORS}", 413)
        found = sorted((_entry(name, entry) for name, entry in value.items()), key=lambda item: (item[2], item[3]))
        end = 0
        for name, spec, start, stop in found:
            if start != end or stop - start != spec.num_bytes:
                raise RefusedError(
                    f"tensor '{name}' is {spec} but lies at bytes {start} to {stop}; expected {spec.num_bytes} bytes "
                    f"from {end} on"
                )
            end = stop
        if end != data_bytes:
            raise RefusedError(f"the head of the tensors describes {end} bytes but {data_bytes} follow it")
        specs = {name: spec for name, spec, _, _ in found}
        return cls(specs, {name: start for name, _, start, _ in found}, data_bytes)

    def tensors(self, data: Any) -> dict[str, Tensor]:
        """The tensors over a writable buffer with the data, without a copy."""
        found = {}
        for name, spec in self.specs.items():
            if spec.num_elements == 0:
                found[name] = torch.empty(spec.shape, dtype=spec.dtype)
            else:
                flat = torch.frombuffer(data, dtype=spec.dtype, count=spec.num_elements, offset=self.offsets[name])
                found[name] = flat if len(spec.shape) == 1 else flat.view(spec.shape)
        return found


class ParameterLayout:
    """The names, dtypes and shapes of the parameters: what a message may carry."""

    def __init__(self, specs: Mapping[str, Spec]) -> None:
        self.specs = dict(specs)
        self.num_bytes = sum(spec.num_bytes for spec in specs.values())

    def packed(self) -> dict[str, Any]:
        """As JSON: {name: [dtype, shape]}."""
        return {name: [_NAMES[spec.dtype], list(spec.shape)] for name, spec in self.specs.items()}

    def check(self, name: str, spec: Spec, *, also: tuple[torch.dtype, ...] = ()) -> None:
        """Check that a tensor is one of the parameters.

        Args:
            name: Which one.
            spec: The spec that came.
            also: Dtypes that are accepted instead of the parameter's own.

        Raises:
            RefusedError: There is no such parameter, or it has another dtype or shape.
        """
        expected = self.find(name)
        if spec.shape != expected.shape or spec.dtype not in (expected.dtype, *also):
            raise RefusedError(f"'{name}' came as {spec}, expected {expected}")

    def find(self, name: str) -> Spec:
        """The spec of a parameter.

        Raises:
            RefusedError: There is no such parameter.
        """
        if name not in self.specs:
            raise RefusedError(f"there is no parameter '{name[:200]}'; GET /status lists them", 404)
        return self.specs[name]

    def check_whole(self, specs: Mapping[str, Spec]) -> None:
        """Check that a message carries all parameters and nothing else.

        Raises:
            RefusedError: It does not.
        """
        for name, spec in specs.items():
            self.check(name, spec)
        missing = [name for name in self.specs if name not in specs]
        if missing:
            raise RefusedError(f"'{missing[0]}' is missing; expected all {len(self.specs)} parameters")


@lru_cache(maxsize=64)
def _parse(text: bytes, data_bytes: int) -> TensorHead:
    """Parse a head; cached, as a client sends the same one again and again."""
    return TensorHead.read(text, data_bytes)


def head_length(prefix: bytes | bytearray | memoryview, body_bytes: int) -> int:
    """How long the JSON of a head is, by the eight bytes before it.

    Raises:
        RefusedError: Longer than the whole body, or than is allowed.
    """
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEAD_BYTES, body_bytes - LENGTH_BYTES) or length < 2:
        raise RefusedError(
            f"the head of the tensors is {length} bytes of a body of {body_bytes}; expected safetensors with a head of "
            f"at most {MAX_HEAD_BYTES}"
        )
    return length


def encode(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """A message's tensors as buffers to be sent one after another: the head, then each tensor's own memory.

    Args:
        tensors: Contiguous CPU tensors. They must not change until everything has been sent.
    """
    head, order = _head(tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()))
    return [memoryview(head), *(bytes_of(tensors[name]) for name in order)]


@lru_cache(maxsize=64)
def _head(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> tuple[bytes, list[str]]:
    """The head of some tensors, and the order in which the non-empty ones follow."""
    entries, order, end = {}, [], 0
    for name, dtype, shape in sorted(
        tensors, key=lambda item: -item[1].itemsize
    ):  # the widest first, so that all are aligned
        start, end = end, end + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        if end > start:
            order.append(name)
    text = write_json(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, order


class Sender:
    """Encodes the messages of one sender: tensors at the same addresses as last time are not looked at again."""

    def __init__(self) -> None:
        self._known: list[Any] | None = None
        self._parts: list[memoryview] = []

    def encode(self, tensors: Mapping[str, Tensor]) -> list[memoryview]:
        """As the function of that name."""
        found = [(name, t.data_ptr(), t.dtype, t.shape) for name, t in tensors.items()]
        if found == self._known:
            return self._parts
        parts = encode(tensors)
        if sum(map(len, parts)) <= KEPT_BYTES:  # these parts keep the memory of the tensors alive, so that
            self._known, self._parts = found, parts  # nothing else can lie there
        return parts


def _entry(name: str, entry: Any) -> tuple[str, Spec, int, int]:
    shown = name[:200]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise RefusedError(f"tensor '{shown}' is badly described; expected dtype, shape and data_offsets")
    spec, offsets = Spec.parse(name, entry["dtype"], entry["shape"]), entry["data_offsets"]
    if not _sizes(offsets) or len(offsets) != 2:
        raise RefusedError(f"tensor '{shown}' has bad data_offsets, expected [begin, end]")
    return name, spec, offsets[0], offsets[1]


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 48 for size in value)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if tensor.dtype not in _IN_NUMPY or tensor.requires_grad or not tensor.dim():
        tensor = octets(tensor)
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def fresh(num_bytes: int) -> memoryview:
    """New memory of this size (at least one byte), aligned for any tensor."""
    if num_bytes >= _PAGES_BYTES:
        return memoryview(mmap.mmap(-1, num_bytes))  # given back at once when it is gone, unlike malloc's
    array: Any = torch.empty(max(num_bytes, 1), dtype=torch.uint8).numpy()
    return memoryview(array)
