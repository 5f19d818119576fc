"""`evenstep verify`: run a script on several numbers of workers and compare every tensor after every step."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.native import core

__all__ = ["compare", "verify"]


@dataclass(frozen=True)
class Digests:
    """What one run left: digests by tensor name for every version, and the closing fingerprint."""

    num_workers: int
    steps: list[dict[str, str]]
    fingerprint: str


def verify(
    script: Path | str,
    args: Sequence[str],
    counts: Sequence[int],
    steps: int | None,
    shards: int | None,
    timeout_s: float,
) -> int:
    """Run the script once for each number of workers; print a table; return 0 if all agree, else 1.

    Args:
        script: A file, or the name of a module.
        args: Its arguments.
        counts: The numbers of workers.
        steps: After how many steps the batches end; None: where the script ends them.
        shards: Parts of every batch; None: the script's.
        timeout_s: How long each run may take.

    Raises:
        EvenstepError: A run failed, or took longer than `timeout_s`.
        ConfigError: The script made no step.
    """
    with tempfile.TemporaryDirectory(prefix="evenstep-verify-") as folder:
        runs = []
        for number, count in enumerate(counts):
            runs.append(_digests(Path(folder) / f"{number}.jsonl", script, args, count, steps, shards, timeout_s))
            last = runs[-1]
            print(f"{count:>3} workers  {len(last.steps) - 1:>5} steps  fingerprint {last.fingerprint}", flush=True)
    differences = [text for run in runs[1:] if (text := compare(runs[0], run))]
    for text in differences:
        print(text)
    if not differences:
        print("all equal, at every step")
    return 1 if differences else 0


def _digests(
    path: Path,
    script: Path | str,
    args: Sequence[str],
    count: int,
    steps: int | None,
    shards: int | None,
    timeout_s: float,
) -> Digests:
    variables = {**os.environ, "EVENSTEP_DIGESTS": str(path)}
    if steps is not None:
        variables["EVENSTEP_MAX_STEPS"] = str(steps)
    command = [sys.executable, "-m", "evenstep", "run", "-n", str(count)]
    command += ["--shards", str(shards)] if shards is not None else []
    # The supervisor dies with us and its workers with it, so killing it, or us, leaves nothing behind.
    try:
        done = subprocess.run(
            [*command, *(["-m"] if isinstance(script, str) else []), str(script), *args],
            env=variables,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            preexec_fn=core.die_with_parent,
        )
    except subprocess.TimeoutExpired:
        raise EvenstepError(f"{script} on {count} workers did not end within {timeout_s:g} s; see --timeout") from None
    if done.returncode != 0:
        raise EvenstepError(
            f"{script} on {count} workers ended with exit code {done.returncode}:\n{done.stderr.rstrip()}"
        )
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = [record["digests"] for record in records if "digests" in record]
    if len(found) < 2:
        raise ConfigError(f"{script} made no step on {count} workers; verify compares what run.step commits")
    closing = [record["fingerprint"] for record in records if "fingerprint" in record]
    return Digests(count, found, closing[-1] if closing else "(the run was never closed)")


def compare(a: Digests, b: Digests) -> str | None:
    """The first step and the first tensor in which two runs differ, as a sentence; None if there is none."""
    where = f"{a.num_workers} and {b.num_workers} workers differ"
    for step, (left, right) in enumerate(zip(a.steps, b.steps, strict=False)):
        different = [name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
        if different:
            when = f"after step {step}" if step else "before the first step"
            others = f", and in {len(different) - 1} more" if len(different) > 1 else ""
            hint = (
                "" if step else ": the initial weights are not seeded; build the model inside `with evenstep.Run(...)`"
            )
            return f"{where} {when}, first in '{different[0]}'{others}{hint}"
    if len(a.steps) != len(b.steps):
        return f"{where} in their number of steps: {len(a.steps) - 1} and {len(b.steps) - 1}"
    if a.fingerprint != b.fingerprint:
        return f"{where} at the end only: the script changed the state after its last step"
    return None
