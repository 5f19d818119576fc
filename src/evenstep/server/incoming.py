"""From the tensors of a message to a contribution: what each of them is, checked by its head alone.

An update's tensors are named after the parameters. They may come in another form than the parameter's:

- bfloat16 instead of a wider dtype;
- top-k: `NAME#indices` (int32 or int64, growing) and `NAME#values` instead of `NAME`;
- tree nodes: `FIRST-END/NAME` for every node, with `shards` and `spans` in the fields;
- new values of buffers, which the fields name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.plan import tree
from evenstep.server.rounds import Contribution
from evenstep.server.wire import Head, Layout, Spec

__all__ = ["INDICES", "VALUES", "Incoming", "Places", "integer"]

INDICES, VALUES = "#indices", "#values"
_INDEX_DTYPES = (torch.int32, torch.int64)
MAX_SHARDS = 256
MAX_NOTE = 16384
Place = tuple[tuple[int, int] | None, str]


@dataclass(frozen=True, eq=False)
class Places:
    """Which node and parameter each tensor of a message belongs to.

    Attributes:
        of: By the name of the tensor.
        plain: Each is a parameter's mean, whole and of its dtype.
    """

    of: Mapping[str, Place]
    plain: bool


def integer(fields: Mapping[str, Any], name: str, default: int, low: int = 0, high: int = 1 << 62) -> int:
    """A whole number from a request.

    Raises:
        RefusedError: It is none, or out of range.
    """
    value = fields.get(name, default)
    if type(value) is not int or not low <= value <= high:
        raise RefusedError(f"{name}={str(value)[:40]!r}, expected a whole number from {low} to {high}")
    return value


@dataclass(slots=True)
class Incoming:
    """What an update will be when its data is there.

    Attributes:
        spans: The tree nodes, or nothing.
        num_shards: K, if these are tree nodes.
        buffers: Which tensors are new values of buffers.
        samples: How many samples a mean is over.
        note: For all who take part.
        options: For the optimizer.
        places: As `check` found them.
    """

    layout: Layout
    spans: tuple[tuple[int, int], ...]
    num_shards: int | None
    buffers: frozenset[str]
    samples: int
    note: Any
    options: Any = None
    places: "Places" = field(default_factory=lambda: Places({}, plain=False))

    @classmethod
    def read(cls, layout: Layout, fields: Mapping[str, Any]) -> "Incoming":
        """Read the fields of an update.

        Raises:
            RefusedError: They make no sense.
        """
        num_shards = None
        spans: tuple[tuple[int, int], ...] = ()
        if "shards" in fields:
            num_shards = integer(fields, "shards", 0, 1, MAX_SHARDS)
            spans = _spans(fields.get("spans"), num_shards)
        buffers = fields.get("buffers", [])
        if not isinstance(buffers, list) or not all(isinstance(name, str) for name in buffers):
            raise RefusedError("buffers is no list of names")
        samples = integer(fields, "samples", 1, 0)
        if "note" in fields and len(str(fields["note"])) > MAX_NOTE:
            raise RefusedError(f"the note is longer than {MAX_NOTE} characters", 413)
        return cls(layout, spans, num_shards, frozenset(buffers), samples, fields.get("note"), fields.get("options"))

    def check(self, head: Head) -> Places:
        """See that every tensor of a message is one that it may carry; return which ones.

        Raises:
            RefusedError: One is not.
        """
        places: dict[str, Place] = {}
        for name, spec in head.specs.items():
            if name.endswith(INDICES) and name not in self.layout.specs:
                name = name.removesuffix(INDICES)
                self._check_sparse(name, spec, head)
                places[name] = (None, name)
            elif name.endswith(VALUES) and name not in self.layout.specs:
                if name.removesuffix(VALUES) + INDICES not in head.specs:
                    raise RefusedError(f"'{name[:200]}' came without its indices")
            else:
                span, parameter = self._place(name)
                self.layout.check(parameter, spec, also=_narrower(self.layout.find(parameter)))
                places[name] = (span, parameter)
        specs = self.layout.specs
        plain = self.num_shards is None and not self.buffers and all(specs.get(n) == s for n, s in head.specs.items())
        return Places(places, plain)

    def _check_sparse(self, name: str, indices: Spec, head: Head) -> None:
        if self.num_shards is not None:
            raise RefusedError("tree nodes are whole; send top-k values as a mean")
        expected, values = self.layout.find(name), head.specs.get(name + VALUES)
        if name in head.specs:
            raise RefusedError(f"'{name}' came twice: whole, and as top-k values")
        if values is None or len(indices.shape) != 1 or indices.shape != values.shape:
            raise RefusedError(f"'{name}' came as top-k values, expected as many values as indices")
        if indices.dtype not in _INDEX_DTYPES or values.dtype not in (expected.dtype, *_narrower(expected)):
            raise RefusedError(f"'{name}' came as top-k {values} by {indices}, expected {expected}")
        if indices.num_elements > expected.num_elements:
            raise RefusedError(f"'{name}' came as {indices.num_elements} values of {expected.num_elements}")

    def _place(self, name: str) -> tuple[tuple[int, int] | None, str]:
        if self.num_shards is None or name in self.buffers:
            return None, name
        node, _, parameter = name.partition("/")
        for span in self.spans:
            if node == f"{span[0]}-{span[1]}":
                return span, parameter
        raise RefusedError(f"'{name[:200]}' belongs to none of the tree nodes {list(self.spans)}")

    def contribution(self, tensors: Mapping[str, Tensor]) -> Contribution:
        """What the update is, now that its data is here.

        Raises:
            RefusedError: Top-k indices are not in order, or out of range.
        """
        if self.places.plain:
            return Contribution(tensors, self.samples, note=self.note, options=self.options, form=self.places)
        nodes: dict[tuple[int, int], dict[str, Tensor]] = {span: {} for span in self.spans}
        means: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for name, (span, parameter) in self.places.of.items():
            expected = self.layout.specs[parameter]
            tensor = tensors[name] if name in tensors else _dense(name, expected, tensors)
            held = buffers if parameter in self.buffers else means if span is None else nodes[span]
            held[parameter] = tensor.to(expected.dtype)
        return Contribution(
            means, self.samples, list(nodes.items()), self.num_shards, buffers, self.note, self.options, self.places
        )


def _narrower(spec: Spec) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if spec.dtype in (torch.float32, torch.float64) else ()


def _spans(value: Any, num_shards: int) -> tuple[tuple[int, int], ...]:
    nodes = tree.tree_nodes(num_shards)
    if not isinstance(value, list) or len(value) > num_shards:
        raise RefusedError("spans is no list of [first, end]")
    found: list[tuple[int, int]] = []
    for span in value:
        if not isinstance(span, list) or len(span) != 2 or tuple(span) not in nodes:
            raise RefusedError(f"{str(span)[:40]} is no node of the tree over {num_shards} shards")
        found.append((span[0], span[1]))
    if any(a[1] > b[0] for a, b in pairwise(found)):
        raise RefusedError("spans overlap, or are not in order")
    return tuple(found)


def _dense(name: str, expected: Spec, tensors: Mapping[str, Tensor]) -> Tensor:
    indices, values = tensors[name + INDICES].long(), tensors[name + VALUES]
    if indices.numel() and (
        int(indices[0]) < 0 or int(indices[-1]) >= expected.num_elements or not bool((indices.diff() > 0).all())
    ):
        raise RefusedError(f"the top-k indices of '{name}' do not grow from 0 to {expected.num_elements - 1}")
    dense = torch.zeros(expected.num_elements, dtype=expected.dtype)
    dense[indices] = values.to(expected.dtype)
    return dense.view(expected.shape)
