"""Takes a picture of the page of a run: ``screenshot.py OUT.png``. It needs chromium.

The run is `examples/digits.py` for more epochs, on three workers of which one is killed.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from evenstep.core.control import ask

DIGITS = Path(__file__).parent.parent / "examples/digits.py"
EPOCHS, FEW, MANY = 100, 30, 90  # steps after which a worker is killed, and after which the picture is taken
SIZE = "1100,1180"
TIMEOUT_S = 120.0
LOOK_S = 2.0


def until(pid: int, step: int) -> list[dict[str, int]]:
    """Wait until all workers of a run have come to a step; returns the workers.

    Raises:
        SystemExit: They did not within two minutes.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        workers: list[dict[str, int]] = ask({"status": True}, pid)["workers"]
        if len(workers) == 3 and all(worker["step"] >= step for worker in workers):
            return workers
        time.sleep(0.05)
    raise SystemExit(f"the run did not come to step {step} within {TIMEOUT_S:.0f} s")


def shoot(url: str, out: Path, folder: str) -> None:
    """Let a browser without a window look at an address for some seconds, and keep what it sees."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("there is no browser here: apt-get install chromium")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
    flags += [f"--window-size={SIZE}", f"--screenshot={out.resolve()}", "--virtual-time-budget=4000"]
    subprocess.run([browser, *flags, url], check=True, timeout=TIMEOUT_S, stderr=subprocess.DEVNULL)


def main() -> int:
    """Train, kill, look."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, DIGITS.name)
        script.write_text(DIGITS.read_text().replace("epochs=6", f"epochs={EPOCHS}"))
        command = [sys.executable, "-m", "evenstep", "run", "-n", "3", "--page", script.name]
        process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None, "asked for"
            line = next(line for line in process.stderr if "page http" in line)
            url = re.search(r"http://\S+?(?=,|\s)", line)
            assert url, line
            os.kill(until(process.pid, FEW)[1]["pid"], signal.SIGKILL)
            until(process.pid, MANY)
            for _ in range(2):  # samples a second are counted between two looks
                urllib.request.urlopen(f"{url[0]}/status", timeout=10).close()
                time.sleep(LOOK_S)
            shoot(url[0], Path(sys.argv[1]), f"{folder}/profile")
        finally:
            process.terminate()
            process.communicate(timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
