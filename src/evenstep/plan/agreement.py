"""Which of several copies of the same thing is right. Pure."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

__all__ = ["right_copy"]

T = TypeVar("T", bound=Hashable)


def right_copy(copies: Sequence[T], sound: Sequence[bool]) -> T | None:
    """The value that counts: that of all copies that are what they were, if they agree; else that of most of all.

    Args:
        copies: What each is now.
        sound: Whether each is what it was, as far as one knows.

    Returns:
        None: there is no majority.
    """
    firm = {copy for copy, is_sound in zip(copies, sound, strict=True) if is_sound}
    if len(firm) == 1:
        return firm.pop()
    ((value, times),) = Counter(copies).most_common(1)
    return value if 2 * times > len(copies) and firm else None
