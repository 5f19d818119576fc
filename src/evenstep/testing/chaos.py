"""Chaos: trainings under hundreds of random faults and resizes, which must end on an undisturbed one's fingerprint.

A seed fixes the whole plan: which faults, where, in which order. Run it by `make chaos`, or

    python -m evenstep.testing.chaos --seed 3 --faults 200
"""

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.core.points import POINTS
from evenstep.testing import faults, training
from evenstep.testing.faults import Fault

__all__ = ["Result", "fingerprint_of", "main", "plan", "run", "under"]

_KINDS = {"kill": 10, "kill all": 1, "stop": 1, "slow": 3, "raise": 3, "exit": 2, "scale": 4}
_RARE = ("join", "recover")  # points that are reached only after another worker has died or joined
_INSIDE = [p for p in POINTS if p not in _RARE]
_STEPS_PER_FAULT = 5


@dataclass(frozen=True)
class Result:
    """The result of a chaos run.

    Attributes:
        same: Whether it ended on the fingerprint of the undisturbed run.
        struck: How many faults of each kind struck.
        recoveries_s: From each death to the next committed step.
        seconds: How long it took.
        errors: What it wrote to standard error.
    """

    same: bool
    struck: Counter[str]
    recoveries_s: list[float]
    seconds: float
    errors: str


def plan(seed: int, num_faults: int) -> list[Fault]:
    """Random faults in order, without a script that raises twice in one step, which would fail the run."""
    dice = random.Random(seed)
    found: list[Fault] = []
    while len(found) < num_faults:
        (kind,) = dice.choices(list(_KINDS), list(_KINDS.values()))
        own_fault = kind in ("raise", "exit")
        point = dice.choice([p for p in _INSIDE if p != "checkpoint"] if own_fault else POINTS)
        visit = dice.randint(1, {"exchange": 30, "checkpoint": 1, "join": 1, "recover": 1}.get(point, 4))
        if point in _RARE:
            found += [Fault("scale", "after commit", workers=3), Fault("kill", "forward", 2)]
        found.append(Fault(kind, point, visit, seconds=dice.random() * 0.05, workers=dice.randint(1, 5)))  # type: ignore[arg-type]  # a kind
        if own_fault:
            found.append(Fault("slow", "after commit", 2, seconds=0.0))
    first = Fault("slow", "after commit", 2, seconds=0.0)  # before the first step a script that fails is simply wrong
    return [first, *found[: num_faults - 1]]


def under(planned: Sequence[Fault], name: str, steps: int, directory: Path, timeout_s: float = 600.0) -> Result:
    """Run a training under faults in order, and once undisturbed.

    Args:
        planned: The faults.
        name: Which of `TRAININGS`.
        steps: How many steps it takes.
        directory: An empty one, for the plan.
        timeout_s: How long the run may take.
    """
    script = [training.__file__, name, "--steps", str(steps)]
    quiet = run([sys.executable, *script], {}, timeout_s)
    script += ["--checkpoints", str(directory / "checkpoints")]
    begin = time.monotonic()
    launcher = [sys.executable, "-m", "evenstep", "run", "-n", "3", "--step-timeout", "10"]
    wild = run([*launcher, *script], faults.plant(planned, directory, in_order=True), timeout_s)
    return Result(
        fingerprint_of(quiet) == fingerprint_of(wild) and wild.returncode == 0,
        Counter(planned[number].kind for number in faults.struck(directory)),
        [float(s) for s in re.findall(r"committed, ([\d.]+) s after", wild.stderr)],
        time.monotonic() - begin,
        wild.stderr,
    )


def run(command: Sequence[str], variables: dict[str, str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a command with these variables added; everything it started is gone when this returns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err += f"\nit did not end within {timeout_s:g} s"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def fingerprint_of(done: "subprocess.CompletedProcess[str]") -> str:
    """The last fingerprint that a command printed, or why there is none."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("fingerprint ")]
    return lines[-1] if lines else f"none, exit code {done.returncode}"


def main() -> int:
    """Run chaos over all trainings and seeds; print what struck and how long recovery took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--faults", type=int, default=150, help="faults of each run")
    options = parser.parse_args()
    print(f"{'training':<12} {'seed':>4} {'faults':>6} {'seconds':>7}  recovery median/worst  result    what struck")
    good = True
    for seed in range(options.seed, options.seed + options.seeds):
        for name in training.TRAININGS:
            with tempfile.TemporaryDirectory() as directory:
                steps = _STEPS_PER_FAULT * options.faults + 10
                result = under(plan(seed, options.faults), name, steps, Path(directory))
            times = result.recoveries_s or [0.0]
            recovery = f"{statistics.median(times):.3f} s / {max(times):.3f} s"
            what = ", ".join(f"{count} {kind}" for kind, count in sorted(result.struck.items()))
            verdict = "the same" if result.same else "DIFFERS"
            print(
                f"{name:<12} {seed:>4} {sum(result.struck.values()):>6} {result.seconds:>7.1f}  {recovery:<21}  "
                f"{verdict:<8}  {what}",
                flush=True,
            )
            if not result.same:
                good = False
                print(result.errors[-20000:], file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
