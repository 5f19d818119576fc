"""The errors of a group. Each is one of ours and one of torch's: code for torch's own backends catches it too."""

from collections.abc import Sequence

from torch.distributed import DistBackendError

from evenstep.core.errors import EvenstepError, MismatchError, PeerError, SilenceError

__all__ = ["LostRankError", "MismatchedRanksError", "SilentRanksError", "group_error", "kind_of"]


class MismatchedRanksError(MismatchError, DistBackendError):
    """Ranks are at different operations."""


class SilentRanksError(SilenceError, DistBackendError):
    """Ranks did not arrive in time.

    Attributes:
        ranks: Their numbers in the group, as far as they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class LostRankError(PeerError, DistBackendError):
    """A rank failed, ended, or left the group."""


def kind_of(error: EvenstepError) -> type[EvenstepError]:
    """Our class of this error, without torch's."""
    return next((kind for kind in (MismatchError, SilenceError) if isinstance(error, kind)), PeerError)


def group_error(kind: str, text: str, rank: int, ranks: Sequence[int] = ()) -> EvenstepError:
    """Make an error.

    Args:
        kind: The name of our class.
        text: The message.
        rank: The rank it is about, by its number in the default group.
        ranks: All ranks it is about, by their numbers in this group.
    """
    if kind == MismatchError.__name__:
        return MismatchedRanksError(text)
    if kind == SilenceError.__name__:
        return SilentRanksError(text, ranks)
    return LostRankError(text, rank)
