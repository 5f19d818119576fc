"""Trains `digits.py` on one worker, then on three of which one is killed halfway, and puts the results side by side.

Run it by `make demo`. The arithmetic is portable: where there is AVX2, everyone sees the fingerprint of the README.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import evenstep
from evenstep.core.control import ask
from evenstep.native import arithmetic

SCRIPT = Path(__file__).with_name("digits.py")
ARITHMETIC = "portable" if arithmetic.bits() else "native"
HALF_WAY = 36  # of 72 steps


def train(num_workers, victim=None):
    """Run the example, passing its progress through; return what it said and how long it took."""
    lost = f", of which worker {victim} is killed half-way" if victim is not None else ""
    print(f"--- {SCRIPT.name} on {num_workers} worker{'s' if num_workers > 1 else ''}{lost}", flush=True)
    begin = time.monotonic()
    options = ["-n", str(num_workers), "--arithmetic", ARITHMETIC, "--page"]  # says where its page is
    command = [sys.executable, "-m", "evenstep", "run", *options, str(SCRIPT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if victim is not None:
            kill(process, victim)
        output, _ = process.communicate(timeout=300)
    if process.returncode != 0:
        raise SystemExit(process.returncode)
    words = output.split()
    found = {word: words[words.index(word) + 1] for word in ("accuracy", "fingerprint")}
    return {
        "workers": f"{num_workers} - 1" if lost else num_workers,
        **found,
        "seconds": f"{time.monotonic() - begin:.1f}",
    }


def kill(process, victim):
    """Wait until a worker is halfway, then kill it with a signal that nobody can catch."""
    while process.poll() is None:
        try:
            workers = ask({"status": True}, process.pid)["workers"]
        except evenstep.ConfigError:  # it has not come so far yet
            workers = []
        for worker in workers:
            if worker["worker"] == victim and worker["step"] >= HALF_WAY:
                os.kill(worker["pid"], signal.SIGKILL)
                return
        time.sleep(0.01)


def main():
    results = [train(1), train(3, victim=1)]
    print("\nworkers  accuracy  seconds  fingerprint")
    for result in results:
        print("{workers:>7}  {accuracy:>8}  {seconds:>7}  {fingerprint}".format(**result))
    same = results[0]["fingerprint"] == results[1]["fingerprint"] and results[0]["accuracy"] == results[1]["accuracy"]
    print("\nthe same weights, bit for bit" if same else "\nTHE RESULTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
