"""Arguments, environment and defaults become one frozen value. Argument beats environment beats default."""

from dataclasses import dataclass
from typing import Literal, TypeVar

from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError

__all__ = ["ARITHMETICS", "DEFAULT_SHARDS", "RunConfig"]

ARITHMETICS = ("native", "portable")
DEFAULT_SHARDS = 8
MAX_SHARDS = 256

T = TypeVar("T")


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run.

    Attributes:
        shards: K, the number of parts that every global batch is cut into. Part of the arithmetic.
        seed: Fixes the order of samples and all randomness. Part of the arithmetic.
        threads: Intra-op threads of every shard's computation. Part of the arithmetic.
        device: "cpu", "cuda" or "cuda:N".
        timeout_s: How long any wait for another worker may take.
        quiet: No progress bar and no closing fingerprint line.
        on_nondeterminism: Whether an operation that torch knows to be non-deterministic raises or only warns.
        arithmetic: "native": as this processor is fastest. "portable": the same bits on every processor.
        graphs: Whether steps on a GPU are replayed from CUDA graphs; "auto": where they can be; True: or else it is
            an error.
        overlap: Whether the graphs of two shards are replayed at the same time.
        recheck: One in this many steps is computed twice, by different workers; 0: none.
        tolerate_wrong: How often a worker may be found to compute wrong before it is dismissed.
        image: After how many steps the state on GPUs is copied to the host, where it outlives all workers; "auto": as
            often as costs little; 0: never.
    """

    shards: int
    seed: int
    threads: int
    device: str
    timeout_s: float
    quiet: bool
    on_nondeterminism: Literal["error", "warn"]
    arithmetic: Literal["native", "portable"] = "native"
    graphs: Literal["auto"] | bool = "auto"
    overlap: bool = False
    recheck: int = 0
    tolerate_wrong: int = 0
    image: Literal["auto"] | int = "auto"

    @classmethod
    def resolve(
        cls, env: Environment, *, shards: int | None, arithmetic: str | None = None, **rest: object
    ) -> "RunConfig":
        """Merge what the script says with what the environment says, which takes precedence, and check it.

        Raises:
            ConfigError: A value is out of range, or script and command line contradict each other on what the bits
                depend on.
        """
        for name in ("timeout_s", "recheck", "tolerate_wrong"):
            if (said := getattr(env, name)) is not None:
                rest[name] = said
        rest["arithmetic"] = _agreed("arithmetic", env.arithmetic, arithmetic, "native")
        config = cls(shards=_agreed("shards", env.shards, shards, DEFAULT_SHARDS), **rest)  # type: ignore[arg-type]  # checked next
        config.check(env)
        return config

    def check(self, env: Environment) -> None:
        """Raise ConfigError for a value that is out of range."""
        for name, low, high in (
            ("shards", 1, MAX_SHARDS),
            ("threads", 1, 1024),
            ("recheck", 0, 10**9),
            ("tolerate_wrong", 0, 10**9),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name}={value!r}, expected a whole number from {low} to {high}")
        for name, fits, expected in (
            ("seed", _is_seed, "a whole number from 0 to 2**63 - 1"),
            ("timeout_s", _is_duration, "a number of seconds above 0"),
            ("on_nondeterminism", ("error", "warn").__contains__, "'error' or 'warn'"),
            ("graphs", ("auto", True, False).__contains__, "'auto', True or False"),
            ("overlap", (True, False).__contains__, "True or False"),
            ("image", _is_interval, "'auto', or a number of steps from 0"),
        ):
            if not fits(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}, expected {expected}")
        self._check_arithmetic()
        if env.num_workers > self.shards:
            raise ConfigError(
                f"{env.num_workers} workers but only {self.shards} shards: every worker needs one; "
                f"use at most -n {self.shards}, or Run(shards={env.num_workers}) (which is another arithmetic)"
            )

    def _check_arithmetic(self) -> None:
        if self.arithmetic not in ARITHMETICS:
            raise ConfigError(f"arithmetic={self.arithmetic!r}, expected one of {', '.join(map(repr, ARITHMETICS))}")
        if self.arithmetic == "portable" and self.threads != 1:
            raise ConfigError(
                f"threads={self.threads} with arithmetic='portable', expected 1: how a sum is cut among threads "
                "changes its bits; use more workers instead"
            )
        if self.arithmetic == "portable" and self.device != "cpu":
            raise ConfigError(
                f"device={self.device!r} with arithmetic='portable', expected 'cpu': GPUs of different kinds give "
                "different bits; use arithmetic='native'"
            )


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _is_interval(value: object) -> bool:
    return value == "auto" or (isinstance(value, int) and value >= 0)


def _agreed(name: str, asked: T | None, said: T | None, otherwise: T) -> T:
    """The one value that command line and script give to a part of the arithmetic."""
    if asked is not None and said is not None and asked != said:
        raise ConfigError(
            f"the command line says --{name} {asked} but the script says Run({name}={said!r}): "
            f"it is part of the arithmetic, so give it in one place only"
        )
    found = said if asked is None else asked
    return otherwise if found is None else found
