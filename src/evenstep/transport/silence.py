"""Who says nothing any more, and to whom something is to be said: times in, machines out. It knows no clock."""

from collections.abc import Iterable

__all__ = ["Silence"]

_BEATS = 5  # in the time after which a machine is lost


class Silence:
    """Of one machine towards others. Times are seconds of one clock.

    Args:
        others: Which machines.
        silence_s: After so long without a word a machine is lost.
        now: When it begins.

    Attributes:
        silence_s: The same.
    """

    def __init__(self, others: Iterable[int], silence_s: float, now: float) -> None:
        self.silence_s, self._looked = silence_s, now
        self._said = dict.fromkeys(others, now)
        self._heard = dict(self._said)

    def said(self, machine: int, now: float) -> None:
        """Something was sent to a machine."""
        self._said[machine] = now

    def heard(self, machine: int, now: float) -> None:
        """Something came from a machine."""
        self._heard[machine] = now

    def due(self, now: float) -> list[int]:
        """To whom nothing was said for so long that a beat is due."""
        return [machine for machine, then in self._said.items() if now - then >= self.silence_s / _BEATS]

    def lost(self, now: float) -> list[int]:
        """Who is lost. Who has not looked for a while was stopped itself, and has not heard what was said."""
        if now - self._looked > self.silence_s / 2:
            self._heard = dict.fromkeys(self._heard, now)
        self._looked = now
        return [machine for machine, then in self._heard.items() if now - then > self.silence_s]
