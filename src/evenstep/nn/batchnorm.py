"""Synchronized batch norm: the statistics span all participants of the surroundings.

The module only orchestrates. The mathematics is in `functional`; who takes part and how bytes move is the business of
the surroundings (`exchange.surroundings`): the shards of a run, the replicas of `DataParallel`, the ranks of a process
group. Where there are none, and always in eval mode, it is `nn.BatchNorm` itself and does not communicate.

All local participants of one call become *one* autograd node, made by the first of them: autograd runs the backward of
every participant of a GPU in one thread, so if each had a node, one that waited for the others would wait forever.
Where the surroundings keep a token it passes from each such node to the next, so that on every worker backward reaches
all of them, in the reverse order of forward.

A residual and an activation can be part of a call: `bn(x, residual=r)` of a layer with `activation="relu"` goes over
the data as often as batch norm alone, and keeps nothing for backward that can be computed again.

Activation checkpointing runs a forward again inside backward, where others cannot be met. The statistics of the first
forward are therefore kept as long as its graph lives, and reused by the recomputation.
"""

from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from evenstep.core.errors import UnsupportedError
from evenstep.exchange.surroundings import Surroundings, current
from evenstep.nn import gpu
from evenstep.nn.alone import NormAlone
from evenstep.nn.functional import EpsMode
from evenstep.nn.joint_norm import NormOffer, apply, lead
from evenstep.nn.passes import Part
from evenstep.nn.process_group import GroupHandle, around
from evenstep.nn.recomputed import Recomputed, recall
from evenstep.nn.tokenless import Tokenless

__all__ = [
    "Activation",
    "LazySyncBatchNorm1d",
    "LazySyncBatchNorm2d",
    "LazySyncBatchNorm3d",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "check_eps_mode",
]

Activation = Literal["relu"]
"""What a layer can do with its output in the same pass."""


class SyncBatchNorm(_BatchNorm):
    """Batch norm over all participants; any input [N, C, ...] of 2 to 5 dimensions.

    Args:
        num_features: C.
        eps: Keeps the variance from zero.
        momentum: Weight of the newest batch in the running statistics; None averages over all batches.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics; without them eval mode uses the batch's own.
        process_group: The ranks to span when there is a process group around; None: the default group.
        eps_mode: "plus" adds eps to the variance as torch does, "clamp" raises the variance to at least eps.
        device: As for `nn.BatchNorm2d`.
        dtype: As for `nn.BatchNorm2d`.
        bias: Whether an affine layer has a bias; False needs a torch whose `nn.BatchNorm2d` knows it.
        activation: "relu" to have `torch.relu` of the output, at no extra pass over the data.

    Attributes:
        qualified_name: The layer's name in its model, for errors; `convert_sync_batchnorm` sets it. Participants are
            matched by it; layers without a name are told apart only by class and size.
        process_group: As the argument. A pickle cannot hold a group: an unpickled layer that had one of its own must
            be given one again before it trains beside other ranks.
    """

    spans_shards = True
    qualified_name = ""
    eps_mode: EpsMode = "plus"
    activation: Activation | None = None
    _group = GroupHandle()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        eps_mode: EpsMode = "plus",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: Activation | None = None,
    ) -> None:
        check_eps_mode(eps_mode)
        _check_activation(activation)
        options: dict[str, Any] = {} if bias else {"bias": False}
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype, **options
        )
        self.process_group = process_group
        self.eps_mode = eps_mode
        if activation is not None:
            self.activation = activation

    @property
    def process_group(self) -> Any:  # noqa: D102  # an attribute, documented with the class
        return self._group.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._group = GroupHandle(group)

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"expected 2D to 5D input (got {input.dim()}D input)")

    def extra_repr(self) -> str:
        """As for `nn.BatchNorm2d`, with the eps mode and the activation where they are not torch's."""
        described: str = super().extra_repr()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self.eps_mode != "plus":
            described += f", eps_mode={self.eps_mode}"
        return described if self.activation is None else f"{described}, activation={self.activation}"

    def forward(self, input: Tensor, residual: Tensor | None = None, *, activation: Activation | None = None) -> Tensor:
        """Normalize a participant's input; blocks until all participants have come, at most for the timeout.

        Args:
            input: ``[N, C, ...]``.
            residual: Added to the normalized input, before the activation.
            activation: The activation of this call; None: the layer's own, if any.

        Raises:
            ValueError: The input's shape does not fit, there is one value per channel in all, or there is no such
                activation.
            EvenstepError: A participant failed, did not come, or is at another layer.
        """
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected input with {self.num_features} channels (got {input.shape[1]} channels)")
        activation = self.activation if activation is None else activation
        _check_activation(activation)
        if self.training or (self.running_mean is None and self.running_var is None):
            if residual is None or (residual.shape == input.shape and residual.dtype == input.dtype):
                output: Tensor = self._with_batch_statistics(input, residual, activation)
                return output
            output = self._with_batch_statistics(input, None, None)  # the residual broadcasts, or changes the type
        else:
            output = self._evaluate(input)
        if residual is not None:
            output = output + residual
        return output if activation is None else torch.relu(output)

    def _evaluate(self, input: Tensor) -> Tensor:
        if self.eps_mode == "plus" or self.running_var is None:
            return super().forward(input)
        variance = self.running_var.clamp(min=self.eps)
        # nn.functional.batch_norm refuses an eps of 0 in some versions.
        return torch.batch_norm(
            input, self.weight, self.bias, self.running_mean, variance, False, 0.0, 0.0, torch.backends.cudnn.enabled
        )

    # A rendezvous cannot be traced: the graph breaks here, cleanly.
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def _with_batch_statistics(self, input: Tensor, residual: Tensor | None, activation: Activation | None) -> Tensor:
        running = _running(self) if self.training and self.track_running_stats else gpu.Running()
        part = Part(input, self.weight, self.bias, residual, activation)
        return self.normalize(part, running, lambda: self._alone(input, residual, activation))

    def normalize(self, part: Part, running: gpu.Running, alone: Callable[[], Tensor]) -> Tensor:
        """Normalize a participant's part by the statistics of all, and update the running ones.

        Args:
            part: The input, and what is done with it.
            running: The running statistics to update.
            alone: Computes the same where there is nobody to meet.
        """
        in_backward = torch._C._current_graph_task_id() != -1  # torch has no public way
        if in_backward and (call := recall(self, part.x)) is not None:
            again = NormOffer.of(self, self.eps_mode, part, in_backward, running).part
            return apply(Recomputed, call, again.activation, *again[:4])  # type: ignore[no-any-return]  # a Tensor
        around_us = self._surroundings(in_backward) if self.training else None
        if around_us is None and self.eps_mode == "plus":
            return alone()
        around_us = around_us or _Nobody()
        tag = f"{self._name()} call {around_us.call_number(self)}"
        offer = NormOffer.of(self, self.eps_mode, part, in_backward, running)
        output: Tensor = around_us.meet(tag, offer, lambda offers: lead(around_us, tag, offers))
        return output if torch.is_grad_enabled() else output.detach()

    def _alone(self, input: Tensor, residual: Tensor | None, activation: Activation | None) -> Tensor:
        """Without others it is `nn.BatchNorm`: itself, or an equivalent with fewer passes."""
        fused = residual is not None or activation is not None
        tensors = (self.weight, self.bias, residual, self.running_mean, self.running_var)
        momentum_known = self.momentum is not None or self.num_batches_tracked is not None
        ours = (
            (fused or gpu.takes(input))
            and input.numel() > self.num_features
            and momentum_known
            and all(t is None or t.device == input.device for t in tensors)
            and not torch._C._are_functorch_transforms_active()  # torch has no public way
        )
        if ours:
            running = _running(self) if self.training and self.track_running_stats else gpu.Running()
            return apply(NormAlone, input, self.weight, self.bias, residual, activation, self.eps, running)  # type: ignore[no-any-return]  # a Tensor
        output = super().forward(input)
        if residual is not None:
            output = output + residual
        return output if activation is None else torch.relu(output)

    def _surroundings(self, in_backward: bool) -> Surroundings | None:
        found = current()
        if found is not None and not in_backward:
            _meets_in_threads.add(self)
            return found
        if not in_backward:
            _meets_in_threads.discard(self)
        elif found is not None or self in _meets_in_threads:
            raise UnsupportedError(
                f"{self._name()} is computed inside backward, where its other participants cannot be met; "
                "with activation checkpointing use torch.utils.checkpoint.checkpoint(..., use_reentrant=False) and "
                "make sure that the recomputation gets the same input as the first one (preserve_rng_state=True)"
            )
        return around(self._group.group)

    def _name(self) -> str:
        return self.qualified_name or f"{type(self).__name__}({self.num_features})"


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """Synchronized batch norm over [N, C] or [N, C, L]."""

    _check_input_dim = nn.BatchNorm1d._check_input_dim


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """Synchronized batch norm over [N, C, H, W]."""

    _check_input_dim = nn.BatchNorm2d._check_input_dim


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """Synchronized batch norm over [N, C, D, H, W]."""

    _check_input_dim = nn.BatchNorm3d._check_input_dim


class LazySyncBatchNorm1d(_LazyNormBase, SyncBatchNorm):
    """What a converted `nn.LazyBatchNorm1d` is until its first input; torch looks `forward` up before that."""

    cls_to_become = SyncBatchNorm1d


class LazySyncBatchNorm2d(_LazyNormBase, SyncBatchNorm):
    """What a converted `nn.LazyBatchNorm2d` is until its first input."""

    cls_to_become = SyncBatchNorm2d


class LazySyncBatchNorm3d(_LazyNormBase, SyncBatchNorm):
    """What a converted `nn.LazyBatchNorm3d` is until its first input."""

    cls_to_become = SyncBatchNorm3d


def check_eps_mode(eps_mode: str) -> None:
    """Refuse what is not an eps mode.

    Raises:
        ValueError: It is neither "plus" nor "clamp".
    """
    if eps_mode not in ("plus", "clamp"):
        raise ValueError(f"eps_mode is {eps_mode!r}, expected 'plus' (var + eps) or 'clamp' (max(var, eps))")


def _check_activation(activation: str | None) -> None:
    if activation not in (None, "relu"):
        raise ValueError(f"activation is {activation!r}, expected None or 'relu'")


def _running(module: SyncBatchNorm) -> gpu.Running:
    return gpu.Running(module.running_mean, module.running_var, module.num_batches_tracked, module.momentum)


class _Nobody(Tokenless):
    """Surroundings without others: what `lead` needs for a layer that is alone with an eps mode that torch lacks."""

    def meet(self, tag: str, value: Any, lead: Any) -> Any:
        return lead([value])[0]

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        return rows

    def call_number(self, layer: object) -> int:
        return 0


_meets_in_threads: WeakSet[SyncBatchNorm] = WeakSet()  # those whose last forward met others in threads
