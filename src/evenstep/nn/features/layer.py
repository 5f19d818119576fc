"""A layer in parts. How many parts there are belongs to the model, not to the machines.

Inside a step of a run the workers share the parts out among themselves (`spread`); everywhere else, and in eval mode,
the caller computes them all. Each part of each shard is computed alone and combined in a fixed order, so the bits are
the same either way.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.core.errors import UnsupportedError
from evenstep.exchange.surroundings import Workers, current
from evenstep.nn.features import spread
from evenstep.nn.features.cuts import Cut

__all__ = ["Partitioned"]


class Partitioned(nn.Module):
    """A layer cut into parts; `evenstep.nn.partition` makes it.

    State dicts hold whole tensors under their original names, and load from these: they fit the original layer, and any
    number of parts.

    Args:
        layer: What was cut.
        cut: How.
        parts: The parts, ordinary layers of torch.
        name: The layer's name in its model, for errors; workers are matched by it.

    Attributes:
        cut: As above.
        parts: As above.
        bias: What is added to a sum of parts; None otherwise.
        kind: The class of the layer that was cut.
    """

    spans_shards = True
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, cut: Cut, parts: Sequence[nn.Module], name: str) -> None:
        super().__init__()
        self.cut, self.qualified_name, self.kind = cut, name, type(layer).__name__
        self.parts = nn.ModuleList(parts)
        self.bias = None if cut.bias is None else layer.get_parameter(cut.bias)
        self._spread_last = False
        self.train(layer.training)

    def extra_repr(self) -> str:
        """What was cut, and how it becomes one again."""
        joined = "added up" if self.cut.gives is None else "concatenated"
        return f"{self.kind} in {len(self.parts)} parts, outputs {joined}"

    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer. In a step of a run, blocks until all shards have come here, at most for the timeout.

        Raises:
            UnsupportedError: It is computed again in backward (activation checkpointing) after a step of a run.
            EvenstepError: Another worker or shard failed, did not come, or is at another layer.
        """
        around = current()
        in_backward = torch._C._current_graph_task_id() != -1  # torch has no public way
        if in_backward and self._spread_last:
            raise UnsupportedError(
                f"'{self.qualified_name}' is partitioned by features and computed again in backward, where the other "
                "workers cannot be met; leave it out of activation checkpointing"
            )
        self._spread_last = self.training and isinstance(around, Workers)
        if self._spread_last:
            output = spread.compute(self, around, input)  # type: ignore[arg-type]  # Workers, as was found above
        else:
            output = self.cut.join([part(self.cut.slice(input, p)) for p, part in enumerate(self.parts)])
        if self.bias is None:
            return output
        return output + self.bias.view(-1, *[1] * self.cut.bias_dims)

    # ---- whole tensors in state dicts ----

    def _named_parts(self, name: str, prefix: str) -> list[str]:
        return [f"{prefix}parts.{p}.{name}" for p in range(len(self.parts))]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As `nn.Module.state_dict`, with the parts put together (so tensors are copies)."""
        found = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        bias = found.pop(prefix + "bias", None)
        for name, dim in self.cut.dims.items():
            found[prefix + name] = torch.cat([found.pop(each) for each in self._named_parts(name, prefix)], dim)
        if self.cut.bias is not None:
            found[prefix + self.cut.bias] = bias
        return found

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Cut whole tensors before the parts load theirs.

        If one is missing or does not fit, the error names the whole tensor, and the parts keep what they have.
        """
        for name, dim in self.cut.dims.items():
            pieces = [part.get_parameter(name).detach() for part in self.parts]
            whole, shape = state_dict.pop(prefix + name, None), torch.cat(pieces, dim).shape
            if whole is None:
                missing_keys.append(prefix + name)
            elif whole.shape != shape:
                error_msgs.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {whole.shape} from checkpoint, "
                    f"the shape in current model is {shape}."
                )
            else:
                pieces = list(torch.split(whole, [piece.shape[dim] for piece in pieces], dim))
            state_dict.update(zip(self._named_parts(name, prefix), pieces, strict=True))
        if self.cut.bias is not None and prefix + self.cut.bias in state_dict:
            state_dict[prefix + "bias"] = state_dict.pop(prefix + self.cut.bias)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
