"""Which machines have fallen silent, and which must be sent a sign of life. Pure: times in, machines out."""

from collections.abc import Iterable

__all__ = ["Silence"]

_BEATS = 5  # beats per `silence_s`


class Silence:
    """What one machine has sent to and heard from the others, and when. Times are seconds of one clock.

    Args:
        others: Which machines.
        silence_s: How long a machine may be silent before it counts as lost.
        now: When it begins.

    Attributes:
        silence_s: As given.
    """

    def __init__(self, others: Iterable[int], silence_s: float, now: float) -> None:
        self.silence_s, self._looked = silence_s, now
        self._said = dict.fromkeys(others, now)
        self._heard = dict(self._said)

    def said(self, machine: int, now: float) -> None:
        """Note that something was sent to a machine."""
        self._said[machine] = now

    def heard(self, machine: int, now: float) -> None:
        """Note that something came from a machine."""
        self._heard[machine] = now

    def due(self, now: float) -> list[int]:
        """The machines to which a beat is due."""
        return [machine for machine, then in self._said.items() if now - then >= self.silence_s / _BEATS]

    def lost(self, now: float) -> list[int]:
        """The lost machines; none if this was not called for a while: then this machine itself was stopped."""
        if now - self._looked > self.silence_s / 2:
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        return [machine for machine, then in self._heard.items() if now - then > self.silence_s]
