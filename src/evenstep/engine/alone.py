"""The surroundings of a shard that is computed on its own: nobody, and a way to say that it has to meet others."""

from typing import Any

from torch import Tensor

from evenstep.core.errors import UnsupportedError

__all__ = ["Alone", "Meets"]


class Meets(BaseException):
    """A shard that is computed on its own has to meet the others. Not an Exception, so no script catches it."""


class Alone:
    """The surroundings of a shard that is computed on its own, as long as it need not meet others.

    Args:
        shard: Its number.
        rows: The rows of its part.
        before: A shard that was computed before it without meeting anybody, if any.
    """

    token: Tensor | None = None
    alone = True

    def __init__(self, shard: int, rows: range, before: int | None) -> None:
        self.shard, self.rows, self._before = shard, rows, before

    def _meet(self, *_: Any) -> Any:
        if self._before is None:
            raise Meets
        raise UnsupportedError(
            f"this shard has to meet all others (in a batch norm, or run.gather), but shard {self._before} ended "
            "without that; the step function must do the same for every part, and model.train() comes before run.step"
        )

    meet = gather = call_number = _meet
