"""Who may stay connected: strangers get a share of the places, and limited time to identify themselves.

A connection is a *stranger* until its first request has been admitted: complete up to its body, and with the right
token where one is needed. Strangers hold at most half of all places. When they come faster than they identify
themselves, the one that has been silent longest is dropped, so a client that speaks at once gets in, however many
others are silent.
"""

from typing import Generic, TypeVar

__all__ = ["Door"]

T = TypeVar("T")


class Door(Generic[T]):
    """The connections of one transport. Pure bookkeeping: no socket, no lock and no clock.

    Args:
        places: How many connections there may be.
        greeting_s: How long one may be a stranger.
    """

    def __init__(self, places: int, greeting_s: float) -> None:
        self._places, self._share, self._greeting_s = places, max(places // 2, 1), greeting_s
        self._strangers: dict[T, float] = {}  # deadlines, in the order of arrival
        self._known: set[T] = set()

    def enter(self, who: T, now_s: float) -> T | None:
        """Take in a connection.

        Returns:
            The one to drop for it: another stranger, or itself if all places are taken; None: no one.
        """
        goes = None
        if len(self._strangers) >= self._share or len(self._strangers) + len(self._known) >= self._places:
            goes = next(iter(self._strangers), who)
            self._strangers.pop(goes, None)
        if goes is not who:
            self._strangers[who] = now_s + self._greeting_s
        return goes

    def admit(self, who: T) -> None:
        """Note that its first request was admitted: it is no longer a stranger."""
        if self._strangers.pop(who, None) is not None:
            self._known.add(who)

    def leave(self, who: T) -> None:
        """Note that it is gone."""
        self._strangers.pop(who, None)
        self._known.discard(who)

    def overdue(self, now_s: float) -> list[T]:
        """Drop and return the strangers whose time is up."""
        late = [who for who, until_s in self._strangers.items() if until_s <= now_s]
        for who in late:
            del self._strangers[who]
        return late

    def next_end_s(self) -> float | None:
        """When the time of the next stranger is up; None if there is none."""
        return next(iter(self._strangers.values()), None)
