"""How long a death costs: from the moment at which the supervisor notices to the next committed step.

python benchmarks/recovery.py
"""

import statistics
import tempfile
from pathlib import Path

from evenstep.testing import Fault
from evenstep.testing.chaos import under

CASES = {
    "a worker is killed": [Fault("kill", "forward", 40, worker=2)],
    "the first worker is killed": [Fault("kill", "forward", 40, worker=0)],
    "inside the update": [Fault("kill", "inside update", 6)],
    "inside the commit": [Fault("kill", "inside commit", 6)],
    "all workers are killed": [Fault("kill all", "forward", 40)],
    "a worker is stopped": [Fault("stop", "forward", 40)],
}
TIMES = 8


def main() -> None:
    """Print a table."""
    print(f"{'what happens':<28} {'times':>5} {'median':>8} {'worst':>8}  goal: 1 s and the step")
    for what, faults in CASES.items():  # a stop counts from when it is noticed, after a second
        with tempfile.TemporaryDirectory() as directory:
            result = under(faults * TIMES, "batchnorm", 60 * TIMES, Path(directory))
        times = result.recoveries_s
        same = "" if result.same else "  THE RESULT DIFFERS"
        print(f"{what:<28} {len(times):>5} {statistics.median(times):>6.3f} s {max(times):>6.3f} s{same}", flush=True)


if __name__ == "__main__":
    main()
