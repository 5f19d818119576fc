"""What a step function may return: a mean over the rows of its part, or a mean over something else, with its weight."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from evenstep.core.errors import ConfigError

__all__ = ["Loss", "PartLoss", "split"]


class Loss:
    """A loss, or a metric, that is a mean over something other than the rows of a part, such as its labelled tokens.

    The mean over the whole batch is then the sum of all parts' totals over the sum of their weights, as if the batch
    had not been cut. A part of weight 0 adds nothing, even if its mean is not a number; if all weights are 0 the step
    changes no parameter and its loss is not a number.

    Args:
        mean: The mean over what the weight counts.
        total: The sum over it, instead of the mean.
        weight: How many there are in this part: a number, or a tensor with one element.

    Raises:
        ConfigError: Neither or both of mean and total are given; or, when it is used, the weight is negative or not
            a number.
    """

    def __init__(self, mean: Any = None, *, total: Any = None, weight: float | Tensor) -> None:
        if (mean is None) == (total is None):
            raise ConfigError("Loss takes a mean or a total, one of them, as in Loss(mean, weight=num_tokens)")
        self.value = total if mean is None else mean
        self.is_total = mean is None
        self.weight = weight

    def of(self, value: Any) -> "Loss":
        """The same kind of loss with another value."""
        return Loss(**{"total" if self.is_total else "mean": value}, weight=self.weight)


@dataclass(frozen=True)
class PartLoss:
    """The loss of one part, as its step function gave it.

    Attributes:
        value: A tensor without dimensions.
        loss: The `Loss` it came in; None: it is the mean over the rows of the part.
        has_graph: Whether it depends on anything that is trained. It need not in every part: one without any positive
            sample may give a plain zero.
    """

    value: Tensor
    loss: Loss | None
    has_graph: bool = True

    def detached(self) -> "PartLoss":
        """The same without its graph."""
        value = self.value.detach()
        return PartLoss(value, self.loss and self.loss.of(value), self.has_graph)

    def share(self, num_rows: int, num_all_rows: int) -> Tensor | None:
        """What backward starts from: this part's share in the batch; None: it has none.

        The weight of the whole batch is known only when all parts have been computed, so for a weighted loss this is
        the share in its sum over all rows, and the sum of the gradients is scaled in the end. A part that is the whole
        batch goes backward from its mean itself.
        """
        if self.loss is None:
            return self.value * (num_rows / num_all_rows)
        if self.loss.is_total:
            return self.value / (self.loss.weight if num_rows == num_all_rows else num_all_rows)
        weight = float(self.loss.weight)  # waits for a device: whether it is 0 decides whether there is a backward
        if not weight:
            return None
        return self.value if num_rows == num_all_rows else self.value * (weight / num_all_rows)


def split(value: Any) -> tuple[PartLoss, dict[str, Any]]:
    """The loss and the metrics that a step function returned.

    Raises:
        ConfigError: It returned something else.
    """
    first, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    loss = first if isinstance(first, Loss) else None
    found = first if loss is None else loss.value
    if not isinstance(found, Tensor) or found.numel() != 1 or not isinstance(metrics, dict):
        shape = f" of shape {tuple(found.shape)}" if isinstance(found, Tensor) else ""
        raise ConfigError(
            f"the step function returned a {type(value).__name__}{shape}; expected the mean loss of its part "
            "as a tensor with one element or evenstep.Loss(mean, weight=n), or (loss, {'metric': value})"
        )
    return PartLoss(found.reshape(()), loss, found.requires_grad), metrics
