"""A training under random faults, whose supervisor is killed too; it must end on an undisturbed one's fingerprint."""

import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenstep.core.control import ask
from evenstep.core.errors import ConfigError
from evenstep.testing import chaos, faults, training
from evenstep.testing.soak.burden import SoakResult, end, start

__all__ = ["Trained"]

_FAULTS_PER_S = 4  # more than there is time for
_ENDLESS = 10**9


class Trained:
    """See `Burden`.

    Args:
        directory: An empty one.
        seconds: How long it will go on.
        seed: Seeds the faults.
    """

    name = "training"

    def __init__(self, directory: Path, seconds: float, seed: int) -> None:
        self._directory, self._seed = directory, seed
        self._checkpoints, self._log = directory / "checkpoints", directory / "training.log"
        planned = chaos.plan(seed, int(_FAULTS_PER_S * seconds) + 10)
        # a script that fails before the first step of a supervisor's life is simply wrong, and ends the run
        self._planned = [fault for fault in planned if fault.kind not in ("raise", "exit")]
        self._dice = random.Random(seed)
        self._life_s = max(seconds / 3, 20.0)  # how long a supervisor lives
        self._kill_at = 0.0
        self._kills = 0
        self._job: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """See `Burden`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._variables = faults.plant(self._planned, self._directory / "faults", in_order=True)
        self._start()

    def _start(self) -> None:
        script = [training.__file__, "batchnorm", "--steps", str(_ENDLESS), "--checkpoints", str(self._checkpoints)]
        launcher = ["-m", "evenstep", "run", "-n", "3", "--step-timeout", "10", "--resume"]
        self._job = start([*launcher, *script], self._log, self._variables)
        self._kill_at = time.monotonic() + self._life_s * self._dice.uniform(0.9, 1.1)

    def turn(self) -> None:
        """See `Burden`."""
        assert self._job is not None, "a burden is begun before it is used"
        if self._job.poll() is None and time.monotonic() > self._kill_at:
            self._job.kill()
            self._job.wait()
            self._kills += 1
            self._start()

    def subjects(self) -> Mapping[str, Sequence[int]]:
        """See `Burden`."""
        assert self._job is not None, "a burden is begun before it is used"
        try:
            workers = [worker["pid"] for worker in ask({"status": True}, self._job.pid)["workers"]]
        except ConfigError:  # it has just begun, or has ended
            workers = []
        return {"training: supervisor": [self._job.pid], "training: workers": workers}

    def finish(self) -> SoakResult:
        """See `Burden`."""
        assert self._job is not None, "a burden is begun before it is used"
        code = end(self._job, signal.SIGTERM)
        text = self._log.read_text(errors="replace")
        num_struck = len(faults.struck(self._directory / "faults"))
        newest = self._newest()
        did = f"{num_struck} faults, {self._kills} supervisors killed, {newest['version']} steps"
        quiet = start(
            [training.__file__, "batchnorm", "--steps", str(newest["version"])], self._directory / "quiet.log"
        )
        quiet.wait()
        found = re.findall(r"^fingerprint (\w+)$", (self._directory / "quiet.log").read_text(), re.MULTILINE)
        same = found == [newest["fingerprint"]]
        result = ("the same bits" if same else "OTHER BITS") + ("" if code == 75 else f", exit code {code} and not 75")
        return SoakResult(same and code == 75, did, result, text)

    def _newest(self) -> dict[str, object]:
        """The facts of the newest checkpoint."""
        of_all = [json.loads(path.read_text()) for path in self._checkpoints.glob("step-*/checkpoint.json")]
        return max(of_all, key=lambda facts: facts["written_s"], default={"version": 0, "fingerprint": "none"})
