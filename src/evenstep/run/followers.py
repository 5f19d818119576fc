"""Callbacks that follow the parameters, such as averages of them: found by what they keep, and refused.

A worker that replaces another takes the results of earlier steps from the journal, and the parameters are newer already
when its callbacks are called for those steps. So what a callback of the user's own works out from them between steps
would silently be something else there.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from evenstep.core.errors import UnsupportedError
from evenstep.run.run import Run

__all__ = ["Followers"]

Seen = list[tuple[int, int]]  # of each tensor: which one it is, and how often it was changed


class Followers:
    """Looks at the callbacks of a framework before every step.

    Args:
        run: The run; what is prepared in it may be followed.
        model: What is trained.
        callbacks: Those of the user and of the framework.
        framework: The package whose own callbacks are known.
        instead: What to do instead, for the error.
    """

    def __init__(self, run: Run, model: nn.Module, callbacks: Iterable[object], framework: str, instead: str) -> None:
        self._run = run
        self._callbacks = [each for each in callbacks if type(each).__module__.partition(".")[0] != framework]
        self._shapes = Counter(tuple(parameter.shape) for parameter in model.parameters())
        self._instead = instead
        self._seen: dict[tuple[int, str], Seen] = {}

    def look(self) -> None:
        """Look whether a callback has changed what looks like a copy of the parameters.

        Raises:
            UnsupportedError: One has.
        """
        for number, callback in enumerate(self._callbacks):
            for name, kept in getattr(callback, "__dict__", {}).items():
                tensors = list(_tensors(kept))
                if not self._is_copy(tensors):
                    continue
                now = [(id(tensor), tensor._version) for tensor in tensors]
                if self._seen.setdefault((number, name), now) != now and not self._run.holds(tensors):
                    raise UnsupportedError(
                        f"the callback {type(callback).__name__} changes self.{name}, which follows the parameters, "
                        "between steps; a worker that replaces another would get something else, since the parameters "
                        f"are newer when it catches up: {self._instead}"
                    )

    def _is_copy(self, tensors: list[Tensor]) -> bool:
        """Whether there is a tensor of its shape for at least half of the parameters."""
        found = (Counter(tuple(tensor.shape) for tensor in tensors) & self._shapes).total()
        return found > 0 and 2 * found >= self._shapes.total()


def _tensors(kept: object) -> Iterator[Tensor]:
    if isinstance(kept, nn.Module):
        yield from kept.parameters()
    elif isinstance(kept, dict | list | tuple):
        yield from (item for item in (kept.values() if isinstance(kept, dict) else kept) if isinstance(item, Tensor))
