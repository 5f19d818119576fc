"""torch's own tests of a backend, which come with torch, run against ours as they run for gloo.

    python tests/distributed/conformance.py             # all of them, for both; what ours does not pass and gloo does
    python tests/distributed/conformance.py test_gather # some
    WORLD_SIZE=8 python tests/distributed/conformance.py # on more than three ranks some are not skipped

Whatever a test asks of "gloo" by name is asked of ours. Ranks are forked, where torch spawns them: that is the only
difference, and saves importing torch a thousand times.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RANKS = "3"
TIMEOUT_S = 120
VARIABLES = {
    "BACKEND": "gloo",  # when torch's module is imported it decides what to skip
    "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TIMEOUT_S),
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


def test_case(backend: str) -> type[unittest.TestCase]:
    """torch's tests, for a backend."""
    os.environ.update(VARIABLES)
    os.environ.setdefault("WORLD_SIZE", RANKS)
    import torch
    from torch.testing._internal.distributed import distributed_test as theirs

    import evenstep.distributed  # noqa: F401  # registers the backend

    torch.set_num_threads(1)
    for supported in (theirs.PROFILING_SUPPORTED_BACKENDS, theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        supported.append(backend)
    really = torch.distributed.init_process_group

    def init_process_group(*args: Any, **options: Any) -> None:
        """What asks for gloo gets the backend that is tested."""
        if options.get("backend") == "gloo":
            options["backend"] = backend
        really(*args, **options)

    torch.distributed.init_process_group = init_process_group

    class Conformance(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        """One process forks the ranks of one test after the other."""

        def setUp(self) -> None:
            super().setUp()
            theirs.BACKEND = backend if self._testMethodName == "test_get_backend" else "gloo"
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Conformance


def run(backend: str, names: Sequence[str], out: Path) -> None:
    """Run tests for a backend; write {name: "passed", "skipped", or why it failed} as JSON."""
    case = test_case(backend)
    found: dict[str, str] = {}
    for name in names or unittest.defaultTestLoader.getTestCaseNames(case):
        result = unittest.TestResult()
        case(name).run(result)
        wrong = [text for _, text in (*result.errors, *result.failures)]
        skipped = [why for _, why in result.skipped]
        found[name] = "\n".join(wrong) or ("skipped" if skipped else "passed")
        out.write_text(json.dumps(found))


def outcomes(backend: str, names: Sequence[str] = (), timeout_s: float | None = None) -> dict[str, str]:
    """Run tests for a backend in a process of its own; what became of each."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--backend", backend, "--out", str(out), *names]
        with log.open("wb") as noise:
            code = subprocess.run(
                command, stdout=noise, stderr=noise, timeout=timeout_s, env={**os.environ, **VARIABLES}, check=False
            ).returncode
        if code:
            raise RuntimeError(f"the tests for {backend} ended with {code}:\n{log.read_text(errors='replace')[-5000:]}")
        return dict(json.loads(out.read_text()))


def main() -> int:
    """Run all for both backends; 0 if ours passes what gloo passes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="which tests (all)")
    parser.add_argument("--backend", help="only this one, with the result in a file")
    parser.add_argument("--out", type=Path, help="that file")
    parser.add_argument("--why", action="store_true", help="show why tests failed")
    options = parser.parse_args()
    if options.backend:
        run(options.backend, options.names, options.out)
        return 0
    found = {backend: outcomes(backend, options.names) for backend in ("gloo", "evenstep")}
    print(f"{'backend':<10} {'passed':>6} {'failed':>6} {'skipped':>7}")
    for backend, results in found.items():
        passed, skipped = (sum(each == kind for each in results.values()) for kind in ("passed", "skipped"))
        print(f"{backend:<10} {passed:>6} {len(results) - passed - skipped:>6} {skipped:>7}")
    short = {name: ours for name, ours in found["evenstep"].items() if ours != found["gloo"][name] == "passed"}
    for name, ours in short.items():
        print(f"\n{name}: gloo passes it, and evenstep: {'skips it' if ours == 'skipped' else 'fails'}")
        if options.why:
            print(ours)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
