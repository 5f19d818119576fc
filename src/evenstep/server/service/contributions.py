"""From the tensors of a message to a contribution: what each of them is, checked from the head alone.

An update's tensors are named after the parameters. They may come in another form than the parameter's:

- bfloat16 instead of a wider dtype;
- top-k: `NAME#indices` (int32 or int64, growing) and `NAME#values` instead of `NAME`;
- tree nodes: `FIRST-END/NAME` for every node, with `shards` and `spans` in the fields;
- new values of buffers, which the fields name.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.server.service.requests import StageUpdate, Update
from evenstep.server.store.rounds import Contribution
from evenstep.server.wire.tensors import ParameterLayout, Spec, TensorHead

__all__ = ["INDICES", "VALUES", "Incoming", "Places"]

INDICES, VALUES = "#indices", "#values"
_INDEX_DTYPES = (torch.int32, torch.int64)
ServerPlace = tuple[tuple[int, int] | None, str]


@dataclass(frozen=True, eq=False)
class Places:
    """Which node and parameter each tensor of a message belongs to.

    Attributes:
        of: By the name of the tensor.
        plain: Each is a parameter's mean, whole and of its dtype.
    """

    of: Mapping[str, ServerPlace]
    plain: bool


class Incoming:
    """An update before its data have arrived.

    Args:
        layout: The parameters.
        request: The fields of the update.

    Attributes:
        places: As `check` found them.
    """

    def __init__(self, layout: ParameterLayout, request: Update | StageUpdate) -> None:
        self.layout, self._request = layout, request
        self._buffers = frozenset(request.buffers)
        self.places = Places({}, plain=False)

    @property
    def form(self) -> tuple[object, ...]:
        """What alone determines which tensors are allowed."""
        return self.layout, self._request.spans, self._request.shards, self._buffers

    def check(self, head: TensorHead) -> Places:
        """Check that a message carries only allowed tensors; return what each is.

        Raises:
            RefusedError: One is not.
        """
        missing = self._buffers - head.specs.keys()
        if missing:
            raise RefusedError(f"buffers names '{min(missing)[:200]}', but no such tensor came")
        places: dict[str, ServerPlace] = {}
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
        whole = self._request.shards is None and not self._buffers
        return Places(places, whole and all(specs.get(name) == spec for name, spec in head.specs.items()))

    def _check_sparse(self, name: str, indices: Spec, head: TensorHead) -> None:
        if self._request.shards is not None:
            raise RefusedError("tree nodes are whole; send top-k values as a mean")
        expected, values = self.layout.find(name), head.specs.get(name + VALUES)
        if name in head.specs:
            raise RefusedError(f"'{name}' was sent twice: whole, and as top-k values")
        if values is None or len(indices.shape) != 1 or indices.shape != values.shape:
            raise RefusedError(f"'{name}' came as top-k values, expected as many values as indices")
        if indices.dtype not in _INDEX_DTYPES or values.dtype not in (expected.dtype, *_narrower(expected)):
            raise RefusedError(f"'{name}' came as top-k {values} by {indices}, expected {expected}")
        if indices.num_elements > expected.num_elements:
            raise RefusedError(f"'{name}' came as {indices.num_elements} values of {expected.num_elements}")

    def _place(self, name: str) -> tuple[tuple[int, int] | None, str]:
        if self._request.shards is None or name in self._buffers:
            return None, name
        node, _, parameter = name.partition("/")
        for span in self._request.spans:
            if node == f"{span[0]}-{span[1]}":
                return span, parameter
        raise RefusedError(f"'{name[:200]}' belongs to none of the tree nodes {list(self._request.spans)}")

    def contribution(self, tensors: Mapping[str, Tensor]) -> Contribution:
        """The contribution, now that the data are here.

        Raises:
            RefusedError: Top-k indices are not in order, or out of range.
        """
        request = self._request
        note = request.note if isinstance(request, Update) else None
        if self.places.plain:
            return Contribution(tensors, request.samples, note=note, options=request.options, form=self.places)
        nodes: dict[tuple[int, int], dict[str, Tensor]] = {span: {} for span in self._request.spans}
        means: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for name, (span, parameter) in self.places.of.items():
            expected = self.layout.specs[parameter]
            tensor = tensors[name] if name in tensors else _dense(name, expected, tensors)
            held = buffers if parameter in self._buffers else means if span is None else nodes[span]
            held[parameter] = tensor.to(expected.dtype)
        return Contribution(
            means, request.samples, list(nodes.items()), request.shards, buffers, note, request.options, self.places
        )


def _narrower(spec: Spec) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if spec.dtype in (torch.float32, torch.float64) else ()


def _dense(name: str, expected: Spec, tensors: Mapping[str, Tensor]) -> Tensor:
    indices, values = (
        tensors[name + INDICES].to(torch.int64, copy=True),
        tensors[name + VALUES],
    )  # a copy that no client can change
    if indices.numel() and (
        int(indices[0]) < 0 or int(indices[-1]) >= expected.num_elements or not bool((indices.diff() > 0).all())
    ):
        raise RefusedError(f"the top-k indices of '{name}' do not grow from 0 to {expected.num_elements - 1}")
    dense = torch.zeros(expected.num_elements, dtype=expected.dtype)
    dense[indices] = values.to(expected.dtype)
    return dense.view(expected.shape)
