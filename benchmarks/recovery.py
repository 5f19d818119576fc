"""How long a death costs: from the moment at which the supervisor notices to the next committed step.

python benchmarks/recovery.py
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evenstep.testing import Fault
from evenstep.testing.chaos import under
from results import Record, add_option, shown

CASES = {
    "a worker is killed": [Fault("kill", "forward", 40, worker=2)],
    "the first worker is killed": [Fault("kill", "forward", 40, worker=0)],
    "inside the update": [Fault("kill", "inside update", 6)],
    "inside the commit": [Fault("kill", "inside commit", 6)],
    "all workers are killed": [Fault("kill all", "forward", 40)],
    "a worker is stopped": [Fault("stop", "forward", 40)],
}
TIMES = 8


def rows(record: Record) -> Iterator[list[str]]:
    """One case after the other; a stop counts from when it is noticed, after a second."""
    for what, faults in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            result = under(faults * TIMES, "batchnorm", 60 * TIMES, Path(directory))
        times = result.recoveries_s
        if not result.same:
            record.note(f"The result differs: {what}.")
        yield [what, str(len(times)), f"{statistics.median(times):.3f}", f"{max(times):.3f}", "1"]


def main() -> int:
    """Print a table; 1 if a result differs."""
    parser = argparse.ArgumentParser(description="Measure how long a death costs.")
    add_option(parser)
    options = parser.parse_args()
    record = Record.begin()
    columns = ["what happens", "times", "median s", "worst s", "goal"]
    chart = {"means": "seconds: median and worst", "base": None, "goal": "goal"}
    record.table(columns, shown(rows(record)), values=columns[2:4], labels=columns[:1], **chart)
    record.save(options.json)
    return 1 if record.notes else 0


if __name__ == "__main__":
    sys.exit(main())
