"""How a layer is cut into parts: which features each part has, what it takes of the input, how outputs become one.

A part is an ordinary layer of torch with fewer features. It takes the whole input (then the gradients of the input are
added up) or a slice of it; outputs are concatenated, or added up. Cutting does not communicate and draws no random
numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from evenstep.core.errors import UnsupportedError
from evenstep.plan import tree
from evenstep.plan.placement import cut

__all__ = ["Cut", "Kind", "Memo", "Place", "check", "dims_of", "features_of", "make_cut", "pair_of"]

Kind = Literal["feature", "input-feature"]
Span = tuple[int, int]
Place = tuple[nn.Module, str]
"""Where a parameter is: its module and its name there."""
Made: TypeAlias = "tuple[Cut, list[nn.Module]]"
Memo = dict[tuple[int, int], list[nn.Parameter]]
"""The parts of parameters cut so far, by the id of the whole and the dimension: tied parameters stay tied."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BETWEEN = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
)
"""Layers that treat every feature alone, without parameters and without randomness."""


@dataclass(frozen=True)
class Cut:
    """How a layer was cut. The parts themselves are modules whose parameters have the names they had in the layer.

    Attributes:
        dims: Along which dimension each parameter was cut, by name.
        input_dim: Along which dimension the input is sliced.
        takes: The slice that each part takes; None: each takes the whole input.
        output_dim: Along which dimension outputs are concatenated.
        gives: Where in the output that of each part is; None: outputs have one shape and are added up.
        bias: The name of what is added to a sum, once; None if nothing is.
        bias_dims: How many dimensions of the output follow that of the bias.
    """

    dims: dict[str, int]
    input_dim: int
    takes: tuple[Span, ...] | None
    output_dim: int
    gives: tuple[Span, ...] | None
    bias: str | None = None
    bias_dims: int = 0

    def slice(self, input: Tensor, part: int) -> Tensor:
        """What a part takes of the input."""
        return _narrow(input, self.input_dim, self.takes, part)

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """One output from those of all parts; added up in the order of the tree over parts."""
        return tree.reduce(outputs, torch.add) if self.gives is None else torch.cat(list(outputs), self.output_dim)

    def slice_back(self, gradient: Tensor, part: int) -> Tensor:
        """A part's share of the output's gradient."""
        return _narrow(gradient, self.output_dim, self.gives, part)

    def join_back(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradient of the input from what the parts found."""
        return tree.reduce(gradients, torch.add) if self.takes is None else torch.cat(list(gradients), self.input_dim)


def _narrow(tensor: Tensor, dim: int, spans: Sequence[Span] | None, part: int) -> Tensor:
    if spans is None:
        return tensor
    first, end = spans[part]
    return tensor.narrow(dim, first, end - first).contiguous()


class _Rows(nn.Embedding):
    """Some rows of an embedding: indices of other rows give zeros."""

    first = 0
    num_all = 0  # rows of all parts together

    def forward(self, input: Tensor) -> Tensor:
        """Look up the rows that are here. An index out of range is left for torch to refuse."""
        rows = input - self.first
        mine = (rows >= 0) & (rows < self.num_embeddings)
        elsewhere = ~mine & (input >= 0) & (input < self.num_all)
        return super().forward(rows.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0)


def pair_of(layer: nn.Module) -> tuple[str, nn.Module, str, nn.Module] | None:
    """The two layers of a chain that can be cut as one, with their names in it; None if it is not such a chain."""
    if type(layer) is not nn.Sequential:
        return None
    named = [(name, child) for name, child in layer.named_children() if type(child) not in _BETWEEN]
    if len(named) != 2 or named[0][1] is not layer[0] or named[1][1] is not layer[-1]:
        return None
    (first, a), (last, b) = named
    supported = (
        type(a) is type(b)
        if type(a) in _CONVOLUTIONS
        else type(a) in (nn.Linear, nn.Embedding) and type(b) is nn.Linear
    )
    return (first, a, last, b) if supported else None


def features_of(layer: nn.Module, kind: Kind) -> int:
    """How many features there are to cut: of the output, of the input, or between the two layers of a chain.

    A convolution in groups counts its groups.
    """
    pair = pair_of(layer)
    if pair is not None:
        return features_of(pair[1], "feature")
    match layer:
        case nn.Linear():
            return layer.out_features if kind == "feature" else layer.in_features
        case nn.Embedding():
            return layer.embedding_dim if kind == "feature" else layer.num_embeddings
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            if layer.groups > 1:
                return layer.groups
            return layer.out_channels if kind == "feature" else layer.in_channels
    raise TypeError(type(layer))


def check(name: str, layer: nn.Module, kind: Kind) -> None:
    """Check whether a layer can be cut this way.

    Raises:
        UnsupportedError: It cannot.
    """
    if pair_of(layer) is not None:
        _check_chain(name, layer, kind)
        return
    if type(layer) not in (nn.Linear, nn.Embedding, *_CONVOLUTIONS):
        raise UnsupportedError(
            f"'{name}' is a {type(layer).__name__}, expected nn.Linear, nn.Embedding, nn.Conv1d, 2d or 3d, or an "
            "nn.Sequential of two of them with activations or pooling in between; mark it 'batch', or not at all"
        )
    _check_hooks(name, layer)
    if isinstance(layer, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise UnsupportedError(
                    f"'{name}' was built with {option}={getattr(layer, option)}, which a part cannot do by itself; "
                    f"build it without {option}"
                )
    if isinstance(layer, _CONVOLUTIONS) and layer.groups > 1 and kind == "input-feature":
        raise UnsupportedError(f"'{name}' has {layer.groups} groups; cut it by 'feature', which cuts between groups")


def _check_chain(name: str, layer: nn.Module, kind: Kind) -> None:
    if kind != "feature":
        raise UnsupportedError(
            f"'{name}' is a chain, which is cut between its two layers: mark it 'feature', not {kind!r}"
        )
    for path, module in layer.named_modules():
        _check_hooks(f"{name}.{path}" if path else name, module)
    pair = pair_of(layer)
    assert pair is not None, "called only for chains"
    first, a, last, b = pair
    check(f"{name}.{first}", a, "feature")
    check(f"{name}.{last}", b, "input-feature")
    if isinstance(a, _CONVOLUTIONS) and a.groups > 1:
        raise UnsupportedError(f"'{name}.{first}' has {a.groups} groups; a chain of convolutions needs groups=1")


def _check_hooks(name: str, layer: nn.Module) -> None:
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(layer, table) for table in tables):
        raise UnsupportedError(
            f"'{name}' has hooks, which would see parts; take them off (also weight norm and the like) before it is cut"
        )


def dims_of(layer: nn.Module, kind: Kind) -> dict[str, int]:
    """Along which dimension each of a layer's parameters is cut, by name; those that are not cut are not there."""
    pair = pair_of(layer)
    if pair is not None:
        first, a, last, b = pair
        ends = (first, dims_of(a, "feature")), (last, dims_of(b, "input-feature"))
        return {f"{at}.{name}": dim for at, dims in ends for name, dim in dims.items()}
    if isinstance(layer, nn.Embedding):
        return {"weight": 1 if kind == "feature" else 0}
    if kind == "feature":
        return {name: 0 for name, _ in layer.named_parameters()}
    return {"weight": 1}


def make_cut(layer: nn.Module, kind: Kind, num_parts: int, memo: Memo) -> tuple[Cut, list[nn.Module]]:
    """Cut a layer that passed `check`; return how, and its parts.

    Args:
        layer: It is left as it is.
        kind: By the features of its output or of its input.
        num_parts: At most `features_of`.
        memo: Shared by all layers that are cut together.
    """
    spans = tuple(cut(features_of(layer, kind), num_parts))
    pair = pair_of(layer)
    if pair is None:
        return _single(layer, kind, spans, memo)
    first, a, last, b = pair
    (head, heads), (tail, tails) = _single(a, "feature", spans, memo), _single(b, "input-feature", spans, memo)
    chains: list[nn.Module] = []
    for one, other in zip(heads, tails, strict=True):
        chains.append(chain := nn.Sequential())
        for name, module in (dict(layer.named_children()) | {first: one, last: other}).items():
            chain.add_module(name, module)
    bias = None if tail.bias is None else f"{last}.{tail.bias}"
    return replace(tail, dims=dims_of(layer, kind), input_dim=head.input_dim, takes=None, bias=bias), chains


def _single(layer: nn.Module, kind: Kind, spans: Sequence[Span], memo: Memo) -> Made:
    match layer:
        case nn.Linear():
            return _linear(layer, kind, spans, memo)
        case nn.Embedding():
            return _embedding(layer, kind, spans, memo)
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return _convolution(layer, kind, spans, memo)
    raise TypeError(type(layer))


def _linear(layer: nn.Linear, kind: Kind, spans: Sequence[Span], memo: Memo) -> Made:
    by_output = kind == "feature"
    parts = []
    for first, end in spans:
        sizes = (layer.in_features, end - first) if by_output else (end - first, layer.out_features)
        parts.append(_empty(nn.Linear, layer, *sizes, bias=by_output and layer.bias is not None))
    return _dense(layer, parts, kind, spans, None, memo, following=0)


def _convolution(layer: Any, kind: Kind, spans: Sequence[Span], memo: Memo) -> Made:
    by_output, grouped = kind == "feature", layer.groups > 1
    channels = layer.in_channels, layer.out_channels
    ins, outs = ([(0, n)] * len(spans) for n in channels)
    if grouped:  # spans count groups
        ins, outs = ([(a * n // layer.groups, b * n // layer.groups) for a, b in spans] for n in channels)
    elif by_output:
        outs = list(spans)
    else:
        ins = list(spans)
    parts = []
    for (first, end), (a, b), (c, d) in zip(spans, ins, outs, strict=True):
        part = _empty(
            type(layer),
            layer,
            b - a,
            d - c,
            layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=end - first if grouped else 1,
            bias=by_output and layer.bias is not None,
            padding_mode=layer.padding_mode,
        )
        parts.append(part)
    return _dense(
        layer, parts, kind, outs if by_output else ins, ins if grouped else None, memo, len(layer.kernel_size)
    )


def _dense(
    layer: Any,
    parts: list[nn.Module],
    kind: Kind,
    spans: Sequence[Span],
    takes: Sequence[Span] | None,
    memo: Memo,
    following: int,
) -> Made:
    """What linear layers and convolutions share: weight [out, in, ...] and bias [out], features in one dimension."""
    feature_dim, dims = -1 - following, dims_of(layer, kind)
    _fill(layer, parts, dims, spans, memo)
    if kind == "feature":
        return Cut(dims, feature_dim, None if takes is None else tuple(takes), feature_dim, tuple(spans)), parts
    bias = None if layer.bias is None else "bias"
    return Cut(dims, feature_dim, tuple(spans), feature_dim, None, bias, following), parts


def _embedding(layer: nn.Embedding, kind: Kind, spans: Sequence[Span], memo: Memo) -> Made:
    parts: list[nn.Module] = []
    for first, end in spans:
        padding = layer.padding_idx
        if kind == "feature":
            part = _empty(nn.Embedding, layer, layer.num_embeddings, end - first, padding_idx=padding)
        else:
            here = padding - first if padding is not None and first <= padding < end else None
            part = _empty(_Rows, layer, end - first, layer.embedding_dim, padding_idx=here)
            part.first, part.num_all = first, layer.num_embeddings
        parts.append(part)
    dims = dims_of(layer, kind)
    _fill(layer, parts, dims, spans, memo)
    return Cut(dims, -1, None, -1, tuple(spans) if kind == "feature" else None), parts


def _empty(kind: type[nn.Module], like: Any, *sizes: Any, **options: Any) -> Any:
    """A layer without values; no random numbers are drawn for them."""
    made = skip_init(kind, *sizes, **options, device=like.weight.device, dtype=like.weight.dtype)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return made.train(like.training)


def _fill(
    layer: nn.Module, parts: Sequence[nn.Module], dims: dict[str, int], spans: Sequence[Span], memo: Memo
) -> None:
    for name, dim in dims.items():
        whole = layer.get_parameter(name)
        pieces = memo.get((id(whole), dim))
        if pieces is None:
            pieces = memo[id(whole), dim] = [
                nn.Parameter(
                    whole.detach().narrow(dim, first, end - first).clone(memory_format=torch.contiguous_format),
                    whole.requires_grad,
                )
                for first, end in spans
            ]
        for part, piece in zip(parts, pieces, strict=True):
            part.register_parameter(name, piece)
