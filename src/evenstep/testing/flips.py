"""Bit flips: trainings on a machine that now and then computes wrong, which must be found and named, with one result.

A seed fixes which worker is wrong, in what, and when. Run it by `make chaos RECHECK=1`, or

    python -m evenstep.testing.flips --seed 3 --flips 150
"""

import argparse
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.testing import faults, training
from evenstep.testing.chaos import fingerprint_of, run
from evenstep.testing.faults import Fault

__all__ = ["FlipsResult", "main", "plan", "under"]

_WORKERS = 3
_POINTS = {"batchnorm": ("gradient", "statistics", "buffer"), "transformer": ("gradient",)}
_NAMED = re.compile(r"worker (\d+) \(machine \S+, process \d+, core \d+\) computed wrong in step (\d+), shard \d+, \S+")


@dataclass(frozen=True)
class FlipsResult:
    """The result of a training under flips.

    Attributes:
        same: Whether it ended on the fingerprint of the healthy one.
        struck: The workers that were wrong, in order.
        named: The workers that were named, in order.
        points: How many flips there were of each kind.
        errors: What it wrote to standard error.
    """

    same: bool
    struck: list[int]
    named: list[int]
    points: Counter[str]
    errors: str

    @property
    def good(self) -> bool:
        """Whether everything was found, named rightly and repaired, and nobody else accused."""
        return self.same and self.struck == self.named


def plan(seed: int, num_flips: int, name: str) -> list[Fault]:
    """Random flips, at most one in a step."""
    dice = random.Random(seed)
    found: list[Fault] = []
    for _ in range(num_flips):
        point, worker = dice.choice(_POINTS[name]), dice.randrange(_WORKERS)
        found.append(Fault("slow", "after commit", seconds=0.0))
        found.append(Fault("flip", point, dice.randint(1, 12), worker=worker, bit=dice.getrandbits(24)))
    return found


def under(planned: Sequence[Fault], name: str, steps: int, directory: Path, timeout_s: float = 1800.0) -> FlipsResult:
    """Run a training under flips in order, with every step computed twice, and once without flips.

    Args:
        planned: The flips.
        name: Which of `TRAININGS`.
        steps: How many steps it takes.
        directory: An empty one, for the plan.
        timeout_s: How long the run may take.
    """
    script = [training.__file__, name, "--steps", str(steps)]
    healthy = run([sys.executable, *script], {}, timeout_s)
    launcher = [sys.executable, "-m", "evenstep", "run", "-n", str(_WORKERS), "--recheck", "1"]
    launcher += ["--tolerate-wrong", str(len(planned))]
    wrong = run([*launcher, *script], faults.plant(planned, directory, in_order=True), timeout_s)
    flips = [fault for n, fault in enumerate(planned) if n in faults.struck(directory) and fault.kind == "flip"]
    return FlipsResult(
        fingerprint_of(healthy) == fingerprint_of(wrong) and wrong.returncode == 0,
        [fault.worker for fault in flips if fault.worker is not None],
        [int(worker) for worker, _ in _NAMED.findall(wrong.stderr)],
        Counter(fault.point for fault in flips),
        wrong.stderr,
    )


def main() -> int:
    """Flip bits in all trainings, then run them without flips; print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="which plan")
    parser.add_argument("--flips", type=int, default=150, help="flips in each training")
    parser.add_argument("--healthy", type=int, default=0, help="steps of each training without flips (false alarms)")
    options = parser.parse_args()
    print(f"{'training':<12} {'seed':>4} {'steps':>6} {'flips':>6} {'named':>6}  result    what was spoiled")
    good = True
    for name in training.TRAININGS:
        for flips, steps in ((options.flips, 3 * options.flips + 10), (0, options.healthy)):
            if not steps:
                continue
            with tempfile.TemporaryDirectory() as directory:
                outcome = under(plan(options.seed, flips, name), name, steps, Path(directory))
            complete = outcome.good and len(outcome.struck) == flips
            what = ", ".join(f"{count} {point}" for point, count in sorted(outcome.points.items())) or "nothing"
            print(
                f"{name:<12} {options.seed:>4} {steps:>6} {len(outcome.struck):>6} {len(outcome.named):>6}  "
                f"{'the same' if complete else 'DIFFERS':<8}  {what}",
                flush=True,
            )
            if not complete:
                good = False
                print(outcome.errors[-20000:], file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
