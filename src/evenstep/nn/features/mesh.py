"""Layers shared by the ranks of a mesh: torch's tensor parallelism, extended to convolutions.

Linear layers and embeddings go through `parallelize_module` with torch's own styles. Torch has none for convolutions
over channels, so there is one here: as in the others, parameters are DTensors, which do the exchanges; the convolution
itself works on local tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.nn.features.cuts import Kind, Place, dims_of, features_of, pair_of

__all__ = ["Channelwise", "DeviceMesh", "check_mesh", "distribute", "size_of"]

_NOT_FOR_DTENSORS = (nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid)
"""Activations whose backward has no sharding strategy in torch; convolutions have local tensors in between."""


def size_of(mesh: DeviceMesh) -> int:
    """The number of ranks of a one-dimensional mesh.

    Raises:
        ConfigError: It has more dimensions.
    """
    if mesh.ndim != 1:
        raise ConfigError(f"the mesh has {mesh.ndim} dimensions; pass one of them, such as mesh['feature']")
    return mesh.size()


def check_mesh(name: str, layer: nn.Module, kind: Kind, num_ranks: int) -> None:
    """Check whether torch can share a layer among this many ranks.

    Raises:
        UnsupportedError: A rank would have no channels of a convolution, or part of a group; or torch cannot
            differentiate what lies between two linear layers.
    """
    pair = pair_of(layer)
    head = layer if pair is None else pair[1]
    if isinstance(head, nn.Linear | nn.Embedding):
        for path, module in layer.named_modules():
            if isinstance(module, _NOT_FOR_DTENSORS):
                raise UnsupportedError(
                    f"'{name}.{path}' is a {type(module).__name__}, which torch cannot differentiate for DTensors; "
                    "mark the two linear layers instead of their chain"
                )
        return
    layer = head
    features = features_of(layer, kind)
    if layer.groups != 1 and features % num_ranks:
        raise UnsupportedError(f"'{name}' has {features} groups for {num_ranks} ranks; a mesh needs a multiple of them")
    if -(-features // num_ranks) * (num_ranks - 1) >= features:
        raise UnsupportedError(
            f"'{name}' has {features} channels, of which torch would deal none to the last of {num_ranks} ranks; "
            "use fewer ranks, or parts=P in a run"
        )


def distribute(
    model: nn.Module, kinds: Mapping[str, Kind], mesh: DeviceMesh, tied: Sequence[Sequence[Place]]
) -> nn.Module:
    """Share out layers that were checked. All ranks of the mesh must call this alike; rank 0's values count.

    Args:
        model: It is changed in place.
        kinds: How each layer is cut, by its name.
        mesh: The ranks.
        tied: The places of each parameter that is in several.
    """
    for name, kind in kinds.items():
        layer = model.get_submodule(name)
        pair = pair_of(layer)
        if pair is None:
            parallelize_module(layer, mesh, _style(layer, kind, inner=False))
        else:
            _, first, _, last = pair
            parallelize_module(first, mesh, _style(first, "feature", inner=True))
            parallelize_module(last, mesh, _style(last, "input-feature", inner=True))
    for (first, name), *others in tied:
        for module, key in others:
            module.register_parameter(key, first.get_parameter(name))
    return model


def _style(layer: nn.Module, kind: Kind, *, inner: bool) -> ParallelStyle:
    """Torch's style for a layer.

    Args:
        layer: The layer.
        kind: How it is cut.
        inner: Whether what lies between this layer and the other one of its chain stays in parts.
    """
    if not isinstance(layer, nn.Linear | nn.Embedding):
        return Channelwise(kind, inner=inner)
    if kind == "input-feature":
        return RowwiseParallel(input_layouts=None if inner else Replicate())
    # a part may be smaller than the others, which a local tensor between the two layers would not show
    return ColwiseParallel(output_layouts=None if inner else Replicate(), use_local_output=not inner)


class Channelwise(ParallelStyle):
    """A convolution in parts by its output channels, its groups, or its input channels.

    Args:
        kind: "feature" or "input-feature".
        inner: Whether the output ("feature") or the input ("input-feature") stays in parts, as local tensors.
    """

    def __init__(self, kind: Kind, *, inner: bool = False) -> None:
        super().__init__()
        self._kind, self._inner = kind, inner

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, whole in list(module.named_parameters()):
            dim = dims_of(module, self._kind).get(name)
            placement = Replicate() if dim is None else Shard(dim)
            shared = distribute_tensor(whole, device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(shared, whole.requires_grad))
        module.__class__ = _CLASSES[type(module)]
        module.mesh, module.kind, module.inner = device_mesh, self._kind, self._inner  # type: ignore[assignment]  # attributes of the new class
        return module


class _Convolution:
    """What the forward of a shared convolution is; before the class of torch in its bases."""

    mesh: DeviceMesh
    kind: Kind
    inner: bool

    def forward(self: Any, input: Tensor) -> Any:
        """Convolve what is here; takes and gives whole tensors, except on the inner side of a chain."""
        channels = input.ndim - 1 - len(self.kernel_size)
        weight = self.weight.to_local()
        bias = None if self.bias is None else self.bias.to_local()
        if self.kind == "feature":
            input = DTensor.from_local(input, self.mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
            if self.groups == 1:
                output = self._conv_forward(input, weight, bias)
            else:
                output = self._some_groups(input, weight, bias, channels)
            return output if self.inner else self._whole(output, channels)
        if not self.inner:
            whole = DTensor.from_local(input, self.mesh, [Replicate()], run_check=False)
            input = whole.redistribute(placements=[Shard(channels)]).to_local()
        part = DTensor.from_local(self._conv_forward(input, weight, None), self.mesh, [Partial()], run_check=False)
        output = part.redistribute(placements=[Replicate()]).to_local()
        return output if bias is None else output + bias.view(-1, *[1] * len(self.kernel_size))

    def _some_groups(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None, channels: int) -> Any:
        all_groups, size = self.groups, self.in_channels // self.mesh.size()
        input = input.narrow(channels, self.mesh.get_local_rank() * size, size)
        self.groups = all_groups // self.mesh.size()
        try:
            return self._conv_forward(input, weight, bias)
        finally:
            self.groups = all_groups

    def _whole(self: Any, part: Tensor, channels: int) -> Any:
        shape = torch.Size([*part.shape[:channels], self.out_channels, *part.shape[channels + 1 :]])
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(
            part.contiguous(), self.mesh, [Shard(channels)], run_check=False, shape=shape, stride=stride
        )
        return parts.redistribute(placements=[Replicate()]).to_local()


class Conv1d(_Convolution, nn.Conv1d):
    """An `nn.Conv1d` that the ranks of a mesh share."""


class Conv2d(_Convolution, nn.Conv2d):
    """An `nn.Conv2d` that the ranks of a mesh share."""


class Conv3d(_Convolution, nn.Conv3d):
    """An `nn.Conv3d` that the ranks of a mesh share."""


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Conv1d: Conv1d, nn.Conv2d: Conv2d, nn.Conv3d: Conv3d}
