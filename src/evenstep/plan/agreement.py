"""Which of several copies of the same thing is right. Pure."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

__all__ = ["right_copy"]

T = TypeVar("T", bound=Hashable)


def right_copy(copies: Sequence[T], sound: Sequence[bool]) -> T | None:
    """The value that counts: that of the sound copies if they agree, otherwise that of the majority of all.

    Args:
        copies: The present value of each copy.
        sound: Whether each is known to be unchanged.

    Returns:
        The value, or None if there is no majority.
    """
    firm = {copy for copy, is_sound in zip(copies, sound, strict=True) if is_sound}
    if len(firm) == 1:
        return firm.pop()
    ((value, times),) = Counter(copies).most_common(1)
    return value if 2 * times > len(copies) and firm else None
