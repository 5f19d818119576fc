"""Limiting the summed gradients of a step as one: unscaled, and clipped to a norm over all workers."""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from evenstep.engine.clipping import norms_of, total_norm
from evenstep.engine.compute import Work
from evenstep.engine.holdings import Holdings
from evenstep.engine.scaling import Scaling

__all__ = ["Limiting"]


class Limiting:
    """Limits sums, which owners have for their parameters, or every worker for all. All workers must call it alike.

    Args:
        holdings: What the workers hold together.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._group, self._models, self._memory = holdings.group, holdings.models, holdings.memory

    def unscale(self, work: Work, sums: Mapping[int, Tensor | None], scaling: Scaling) -> bool:
        """Divide sums by the scale of the loss, in place; return whether all of them are finite, on all workers."""
        if work.scale is None:
            return True
        mine = scaling.unscale(gradient for gradient in sums.values() if gradient is not None)
        return all(self._group.gather_json(work.where + "scaled gradients", mine))

    def clip(self, work: Work, sums: Mapping[int, Tensor | None]) -> float | Tensor | None:
        """Clip sums, in place; return their former norm if that is limited, perhaps still on a device."""
        gradients = {i: gradient for i, gradient in sums.items() if gradient is not None}
        if not self._memory.shared:  # all sums are here
            return work.clipping.clip([gradients[i] for i in self._order(work) if i in gradients])
        work.clipping.clip_elements(gradients.values())
        if work.clipping.norm is None:
            return None
        of_all = self._group.gather_json(work.where + "gradient norms", norms_of(gradients))
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in work.prepared.parameters))
        total = total_norm(of_all, self._order(work), dtype)
        work.clipping.scale_down(gradients.values(), total)
        return float(total)

    def _order(self, work: Work) -> Sequence[int]:
        """The numbers of the trained parameters in the order in which the norms of their gradients are added up."""
        names = work.prepared.names
        if work.clipping.order == "optimizer":
            return range(len(names))
        places = {name: place for place, name in enumerate(self._models.slots.parameters)}
        return sorted(range(len(names)), key=lambda i: places[names[i]])
