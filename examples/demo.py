"""Trains `digits.py` on one worker, then on three, and puts the results side by side. Run it by `make demo`."""

import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits.py")


def train(num_workers):
    """Run the example, passing its progress through; return what it said and how long it took."""
    print(f"--- {SCRIPT.name} on {num_workers} worker{'s' if num_workers > 1 else ''}", flush=True)
    begin = time.monotonic()
    launcher = ["-m", "evenstep", "run", "-n", str(num_workers)] if num_workers > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    words = done.stdout.split()
    found = {word: words[words.index(word) + 1] for word in ("accuracy", "fingerprint")}
    return {"workers": num_workers, **found, "seconds": f"{time.monotonic() - begin:.1f}"}


def main():
    results = [train(1), train(3)]
    print("\nworkers  accuracy  seconds  fingerprint")
    for result in results:
        print("{workers:>7}  {accuracy:>8}  {seconds:>7}  {fingerprint}".format(**result))
    same = results[0]["fingerprint"] == results[1]["fingerprint"] and results[0]["accuracy"] == results[1]["accuracy"]
    print("\nthe same weights, bit for bit" if same else "\nTHE RESULTS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
