"""Chaos over several machines: workers, machines and links are lost, and the fingerprint is that of an undisturbed run.

Machines are network namespaces, so it needs root. Run it by `make chaos MACHINES=3`, or

    python -m evenstep.testing.chaos_machines --machines 3 --faults 300
"""

import argparse
import contextlib
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
from pathlib import Path

from evenstep.testing import training
from evenstep.testing.network import Namespaces, descendants, missing

__all__ = ["Chaos", "main", "recoveries"]

_KINDS = {"worker": 10, "machine": 3, "two machines": 1, "link": 3, "stop": 2, "scale": 2}
_PORT = 7777
_STEPS = 400
_PATIENCE_S = 120.0  # a step must be committed within this time, whatever was lost


class Chaos:
    """One run under faults.

    Args:
        network: Its machines; the first is the head, which stays.
        directory: For logs.
        name: Which of `TRAININGS`.
        dice: The source of randomness.
    """

    def __init__(self, network: Namespaces, directory: Path, name: str, dice: random.Random) -> None:
        self._network, self._directory, self._name, self._dice = network, directory, name, dice
        self._log = directory / "head.log"
        self._agents: dict[int, subprocess.Popen[str]] = {}
        self._mend_at: dict[int, float] = {}  # when to mend links that are cut and machines that are stopped
        self.struck: Counter[str] = Counter()
        self.said = ""

    def run(self, steps: int) -> bool:
        """Strike until the run is over; return whether it ended well."""
        self._start(steps)
        for machine in range(1, self._network.count):
            self._join(machine)
        last, seen_at, next_at = -1, time.monotonic(), time.monotonic() + 3.0
        while self._head.poll() is None:
            time.sleep(0.05)
            now = time.monotonic()
            self._mend(now)
            step = self._progress()
            if step > last:
                last, seen_at = step, now
            elif now - seen_at > _PATIENCE_S:
                os.kill(self._head.pid, signal.SIGKILL)
                self.said = f"no step was committed for {_PATIENCE_S:g} s\n"
                break
            if now >= next_at and step > 0:
                self._strike(now)
                next_at = now + self._dice.uniform(0.1, 1.2)
        self._head.wait()
        self.said += self._log.read_text()
        return self._head.returncode == 0

    def _start(self, steps: int) -> None:
        options = ["--listen", f"{self._network.addresses[0]}:{_PORT}", "--token-file", str(self._token), "-n", "2"]
        script = [training.__file__, self._name, "--steps", str(steps)]
        with self._log.open("w") as log:
            self._head = self._network.evenstep(0, "run", *options, *script, stdout=log, stderr=log)

    @property
    def _token(self) -> Path:
        path = self._directory / "token"
        path.write_text("chaos")
        return path

    def _join(self, machine: int) -> None:
        where = f"{self._network.addresses[0]}:{_PORT}"
        options = ["-n", "1", "--rejoin", "60", "--token-file", str(self._token)]
        with (self._directory / f"machine-{machine}.log").open("a") as log:
            self._agents[machine] = self._network.evenstep(machine, "join", where, *options, stdout=log, stderr=log)

    def _progress(self) -> int:
        """A number that grows with the steps."""
        return len(re.findall(r"steps  loss|is committed", self._log.read_text()))

    # ---- faults ----

    def _strike(self, now: float) -> None:
        (kind,) = self._dice.choices(list(_KINDS), list(_KINDS.values()))
        whole = [m for m in self._agents if m not in self._mend_at and self._agents[m].poll() is None]
        self._dice.shuffle(whole)
        if kind == "worker":
            roots = [self._head.pid, *(self._agents[m].pid for m in whole)]
            children = descendants(self._dice.choice(roots))[1:]
            if children:
                _kill([self._dice.choice(children)], signal.SIGKILL)
        elif kind == "scale":
            self._scale(self._dice.randint(2, 5))
        elif not whole:
            return
        elif kind in ("machine", "two machines"):
            for machine in whole[: 2 if kind == "two machines" else 1]:
                _kill(descendants(self._agents[machine].pid), signal.SIGKILL)
                self._agents[machine].wait()
                self._join(machine)
        elif kind == "link":
            self._network.cut(whole[0])
            self._mend_at[whole[0]] = now + self._dice.uniform(0.2, 5.0)
        else:
            _kill(descendants(self._agents[whole[0]].pid), signal.SIGSTOP)
            self._mend_at[whole[0]] = now + self._dice.uniform(0.2, 5.0)
        self.struck[kind] += 1

    def _scale(self, number: int) -> None:
        pids = [pid for pid in descendants(self._head.pid) if b"--listen" in _command(pid)]
        if not pids:
            return  # the run has just ended
        command = [sys.executable, "-m", "evenstep", "scale", str(number), "--job", str(pids[0])]
        self._network.start(0, *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _mend(self, now: float) -> None:
        for machine, when in list(self._mend_at.items()):
            if now >= when:
                del self._mend_at[machine]
                self._network.mend(machine)
                _kill(descendants(self._agents[machine].pid), signal.SIGCONT)
        for machine, agent in self._agents.items():
            if agent.poll() is not None and machine not in self._mend_at:
                self._join(machine)


def _kill(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _fingerprint(text: str) -> str | None:
    return next((line for line in reversed(text.splitlines()) if line.startswith("fingerprint ")), None)


def recoveries(said: str) -> tuple[list[float], list[float]]:
    """How long until the next committed step, according to the head's log: after one loss, and after several in a row.

    Several add up: a machine that is cut off while another loss is being dealt with is noticed by its silence alone.
    """
    found: tuple[list[float], list[float]] = ([], [])
    losses = 0
    for line in said.splitlines():
        losses += bool(re.search(r"went with it|; it is replaced|; \d+ go on", line))
        if (late := re.search(r"committed, ([\d.]+) s after", line)) is not None:
            found[losses > 1].append(float(late[1]))
            losses = 0
    return found


def _worst(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} / {max(times):.2f} s" if times else "-"


def main() -> int:
    """Run chaos until enough faults have struck; print what struck and how long recovery took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machines", type=int, default=3, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--faults", type=int, default=300, help="at least this many in all")
    parser.add_argument("--steps", type=int, default=_STEPS, help="steps of each run")
    options = parser.parse_args()
    if (why := missing()) is not None:
        print(f"evenstep: no chaos over machines: {why}", file=sys.stderr)
        return 1
    quiet, total, seed, good = {}, 0, options.seed, True
    for name in training.TRAININGS:
        alone = [sys.executable, training.__file__, name, "--steps", str(options.steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(alone, capture_output=True, text=True, check=True, env=environment)
        quiet[name] = _fingerprint(done.stdout)
    print("recovery, median / worst: after one loss, and after several before a step was committed")
    columns = f"{'training':<12} {'seed':>4} {'faults':>6} {'seconds':>7}  {'one':<13}  {'several':<13}"
    print(f"{columns}  {'result':<8}  what struck", flush=True)
    while total < options.faults and good:
        name = training.TRAININGS[seed % len(training.TRAININGS)]
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as directory, Namespaces(options.machines) as network:
            chaos = Chaos(network, Path(directory), name, random.Random(seed))
            good = chaos.run(options.steps) and _fingerprint(chaos.said) == quiet[name]
        count = sum(chaos.struck.values())
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(chaos.struck.items()))
        one, several = map(_worst, recoveries(chaos.said))
        verdict = "the same" if good else "DIFFERS"
        seconds = time.monotonic() - begin
        print(
            f"{name:<12} {seed:>4} {count:>6} {seconds:>7.1f}  {one:<13}  {several:<13}  {verdict:<8}  {what}",
            flush=True,
        )
        if not good:
            print(chaos.said[-20000:], file=sys.stderr)
        total, seed = total + count, seed + 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
