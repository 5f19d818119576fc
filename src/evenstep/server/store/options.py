"""How a store behaves: one frozen value, checked."""

from dataclasses import dataclass

from evenstep.core.errors import ConfigError

__all__ = ["StoreOptions"]


@dataclass(frozen=True)
class StoreOptions:
    """How a store behaves.

    Attributes:
        staleness: 0, s or None; see `store`.
        lock: False: clients in shared memory change the parameters themselves, without asking.
        workers: How many workers there must be at least before a synchronous update is complete.
        lease_s: After how long without a sign of life a worker is dropped.
        reject_nonfinite: Refuse gradients and deltas that hold an infinity or NaN.
    """

    staleness: int | None = 0
    lock: bool = True
    workers: int = 1
    lease_s: float = 30.0
    reject_nonfinite: bool = False

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: A value makes no sense.
        """
        if self.staleness is not None and (not isinstance(self.staleness, int) or self.staleness < 0):
            raise ConfigError(f"staleness={self.staleness!r}, expected 0, a number of updates, or None")
        if not self.lock and self.staleness is not None:
            raise ConfigError("lock=False lets everyone change the parameters at any time; it needs staleness=None")
        if not isinstance(self.workers, int) or self.workers < 1:
            raise ConfigError(f"workers={self.workers!r}, expected a whole number above 0")
        if not self.lease_s > 0:
            raise ConfigError(f"lease_s={self.lease_s!r}, expected a number of seconds above 0")
