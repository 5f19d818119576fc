"""Parameters cut over several servers: which server has which piece. Pure arithmetic over names and sizes.

A large parameter is cut into one piece for every server, a small one stays whole. Cuts are at multiples of `ALIGNMENT`
elements: kernels treat elements in blocks and the rest of a tensor one by one, perhaps with other roundings, so only
then does an element of a piece get the bits that it would have in the whole. If an optimizer does not treat every
element on its own, parameters are not cut at all (`split=False`).

The layout of all parameters and the number of servers determine everything; servers and clients compare `fingerprint`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import ConfigError, RefusedError
from evenstep.plan.placement import cut
from evenstep.server.wire.tensors import INDICES, VALUES, ParameterLayout, Spec
from evenstep.server.wire.text import read_json

__all__ = ["ALIGNMENT", "LAYOUT", "ServerPlace", "Slices", "Stretch", "check_places"]

ALIGNMENT = 128
LAYOUT = "#layout"
"""The name under which the layout of all parameters travels, as JSON in bytes, with the pieces that are put."""

_LARGE = 8  # a parameter of more than an eighth of a server's share is cut


@dataclass(frozen=True)
class ServerPlace:
    """The place of one server among several.

    Attributes:
        index: Its number; server 0 decides the order of updates.
        count: How many there are.
        name: The name of their set.
        split: Whether a parameter may be cut.
    """

    index: int = 0
    count: int = 1
    name: str = ""
    split: bool = True

    @property
    def follows(self) -> bool:
        """Whether another server decides the order of updates."""
        return self.index > 0

    def __str__(self) -> str:
        return f"server {self.index} of {self.count}"


@dataclass(frozen=True)
class Stretch:
    """Elements [first, end) of a parameter, or all of it.

    Attributes:
        parameter: The parameter.
        first: The first element, as if the parameter were flat.
        end: One after the last.
        spec: Dtype and shape of the piece: flat if it is cut.
        whole: Whether it is the whole parameter.
    """

    parameter: str
    first: int
    end: int
    spec: Spec
    whole: bool

    @property
    def name(self) -> str:
        """Its name on the server."""
        return self.parameter if self.whole else f"{self.parameter}[{self.first}:{self.end}]"

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a contiguous tensor: a view."""
        return tensor if self.whole else tensor.reshape(-1)[self.first : self.end]


class Slices:
    """How the parameters lie over the servers.

    Args:
        layout: All parameters.
        count: How many servers.
        split: Whether a parameter may be cut.

    Attributes:
        pieces: The pieces of each server, in the order of the parameters.
        places: For every parameter its pieces: (server, piece).
        fingerprint: Equal if and only if everything is equal.

    Raises:
        RefusedError: A parameter has the name of a piece of another.
    """

    def __init__(self, layout: ParameterLayout, count: int, *, split: bool) -> None:
        self.layout, self.count, self.split = layout, count, split
        loads = [0] * count
        owned: list[list[Stretch]] = [[] for _ in range(count)]
        small: list[Stretch] = []
        for name, spec in layout.specs.items():
            units = -(-spec.num_elements // ALIGNMENT)
            if split and min(units, count) > 1 and spec.num_bytes * count * _LARGE > layout.num_bytes:
                ends = [min(end * ALIGNMENT, spec.num_elements) for _, end in cut(units, count)]
                spans = [(first, end) for first, end in zip([0, *ends], ends, strict=False) if first < end]
                lightest = sorted(range(count), key=lambda i: (loads[i], i))
                for (first, end), server in zip(spans, lightest, strict=False):  # the longest come first
                    piece = Stretch(name, first, end, Spec(spec.dtype, (end - first,)), False)
                    owned[server].append(piece)
                    loads[server] += piece.spec.num_bytes
            else:
                small.append(Stretch(name, 0, spec.num_elements, spec, True))
        for piece in sorted(small, key=lambda piece: -piece.spec.num_bytes):
            server = min(range(count), key=lambda i: (loads[i], i))
            owned[server].append(piece)
            loads[server] += piece.spec.num_bytes
        order = {name: n for n, name in enumerate(layout.specs)}
        self.pieces = [sorted(pieces, key=lambda piece: (order[piece.parameter], piece.first)) for pieces in owned]
        self.places: dict[str, list[tuple[int, Stretch]]] = {name: [] for name in layout.specs}
        for server, pieces in enumerate(self.pieces):
            for piece in pieces:
                self.places[piece.parameter].append((server, piece))
                if not piece.whole and piece.name in layout.specs:
                    raise RefusedError(f"'{piece.name}' is what a part of '{piece.parameter}' would be called")
        text = json.dumps([layout.packed(), count, split])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def read(cls, text: bytes | str, count: int, *, split: bool) -> "Slices":
        """From the JSON of a layout.

        Raises:
            RefusedError: It is not one.
        """
        data = text.encode() if isinstance(text, str) else text
        return cls(ParameterLayout(cls.unpack(read_json(data, "the layout of all parameters"))), count, split=split)

    @staticmethod
    def unpack(packed: Mapping[str, Any]) -> dict[str, Spec]:
        """The specs of the parameters, from `ParameterLayout.packed`.

        Raises:
            RefusedError: It is not one.
        """
        found = {}
        for name, entry in packed.items():
            if not isinstance(entry, list) or len(entry) != 2:
                raise RefusedError(f"the layout of all parameters says '{name[:200]}' badly, expected [dtype, shape]")
            found[name] = Spec.parse(name, *entry)
        return found

    @property
    def text(self) -> bytes:
        """The layout as JSON."""
        return json.dumps(self.layout.packed()).encode()

    def specs(self, server: int) -> dict[str, Spec]:
        """The specs of one server's pieces."""
        return {piece.name: piece.spec for piece in self.pieces[server]}

    def names(self, server: int, parameters: Iterable[str] | None) -> list[str]:
        """The names of one server's pieces of some parameters."""
        wanted = None if parameters is None else set(parameters)
        return [piece.name for piece in self.pieces[server] if wanted is None or piece.parameter in wanted]

    # ---- cutting ----

    def cut(
        self, tensors: Mapping[str, Tensor], *, nodes: bool = False, buffers: Iterable[str] = ()
    ) -> list[dict[str, Tensor]]:
        """The tensors of an update for each server, as views where possible.

        Args:
            tensors: Named after parameters, or as top-k values, or as tree nodes; see `service.contributions`.
            nodes: Whether they are tree nodes, except the buffers.
            buffers: Which are new values of buffers.

        Raises:
            RefusedError: A tensor does not match its parameter. One without a parameter is for server 0 to refuse.
        """
        found: list[dict[str, Tensor]] = [{} for _ in range(self.count)]
        untrained = set(buffers)
        for name, tensor in tensors.items():
            head, parameter = "", name
            if nodes and name not in untrained:
                node, _, parameter = name.partition("/")
                head = f"{node}/"
            if parameter not in self.places and name.endswith((INDICES, VALUES)):
                self._cut_sparse(found, name, tensors)
                continue
            places = self.places.get(parameter)
            if places is None:
                found[0][name] = tensor
                continue
            if not places[0][1].whole:
                self.layout.check(parameter, Spec.of(tensor), also=(torch.bfloat16,))
            for server, piece in places:
                found[server][head + piece.name] = piece.of(tensor)
        return found

    def _cut_sparse(self, found: list[dict[str, Tensor]], name: str, tensors: Mapping[str, Tensor]) -> None:
        """Top-k values by their indices; both at once, when the indices come."""
        parameter, kind = name.rpartition("#")[0], "#" + name.rpartition("#")[2]
        places = self.places.get(parameter)
        if (
            places is None
            or places[0][1].whole
            or parameter + VALUES not in tensors
            or parameter + INDICES not in tensors
        ):
            found[places[0][0] if places else 0][name] = tensors[name]  # its server will say what is wrong, if anything
            return
        if kind != INDICES:
            return
        indices, values = tensors[name], tensors[parameter + VALUES]
        size = self.layout.specs[parameter].num_elements
        sound = indices.ndim == 1 and indices.shape == values.shape and not indices.is_floating_point()
        if (
            not sound
            or (indices.numel() and (int(indices[0]) < 0 or int(indices[-1]) >= size))
            or not bool((indices.diff() > 0).all())
        ):
            raise RefusedError(f"the top-k indices of '{parameter}' do not grow from 0 to {size - 1}")
        for server, piece in places:
            bounds = torch.searchsorted(indices, torch.tensor([piece.first, piece.end], dtype=indices.dtype)).tolist()
            found[server][piece.name + INDICES] = indices[bounds[0] : bounds[1]] - piece.first
            found[server][piece.name + VALUES] = values[bounds[0] : bounds[1]]

    # ---- joining ----

    def room(
        self, names: Iterable[str], out: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Memory for whole parameters, and the pieces of each server in it.

        Args:
            names: Which ones.
            out: Tensors to use, if they are like the parameters and contiguous; None for new ones.

        Raises:
            RefusedError: There is no such parameter.
        """
        whole: dict[str, Tensor] = {}
        pieces: list[dict[str, Tensor]] = [{} for _ in range(self.count)]
        for name in names:
            spec = self.layout.find(name)
            whole[name] = torch.empty(spec.shape, dtype=spec.dtype) if out is None else out[name]
            for server, piece in self.places[name]:
                pieces[server][piece.name] = piece.of(whole[name].detach())
        return whole, pieces

    def join(self, status: list[dict[str, Any]]) -> dict[str, Any]:
        """The servers' statuses of pieces, merged into statuses of parameters."""
        found = {}
        for name, spec in self.layout.specs.items():
            entries = [status[server]["parameters"][piece.name] for server, piece in self.places[name]]
            found[name] = {
                **entries[0],
                "shape": list(spec.shape),
                "version": min(entry["version"] for entry in entries),
            }
        return found


def check_places(urls: Sequence[str], places: Sequence[Any]) -> None:
    """Check that these are all the servers of one set, in order.

    Raises:
        ConfigError: They are not.
    """
    for url, (index, num_servers, name, _) in zip(urls, places, strict=True):
        if num_servers == 1:
            raise ConfigError(f"{url} holds a whole model; give only its address, without {len(urls) - 1} others")
        if num_servers != len(urls):
            raise ConfigError(
                f"{url} is server {index} of {num_servers}, but {len(urls)} addresses were given; give all"
            )
        if name != places[0][2]:
            raise ConfigError(f"{urls[0]} and {url} belong to different sets of servers; give those of one set")
    order = [place[0] for place in places]
    if order != sorted(order) or len(set(order)) < len(order):
        raise ConfigError(f"the addresses are of servers {order}, expected {sorted(set(range(len(urls))))} in order")
