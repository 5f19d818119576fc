"""What surroundings without chained calls in backward have in common."""

from torch import Tensor

__all__ = ["Tokenless"]


class Tokenless:
    """Surroundings that keep no token: every joint node stands alone.

    A script may then run several forwards and differentiate them in any order, as it may in plain torch. It also keeps
    the graph, which holds the surroundings, from being held by them.
    """

    alone = False

    @property
    def token(self) -> Tensor | None:
        """Nothing to hang on to."""
        return None

    @token.setter
    def token(self, value: Tensor | None) -> None:
        pass
