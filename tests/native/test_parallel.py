"""The helper threads of the C core under ThreadSanitizer: no race, no lost part, nobody left waiting after a fork."""

import os
import subprocess
from pathlib import Path

import evenstep.native

NATIVE = Path(evenstep.native.__file__).parent
STRESS = Path(__file__).with_name("stress_parallel.c")
# Without __gnu_linux__ no function is cloned for several processors: clones are chosen before the sanitizer is up.
GCC = ["gcc", "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-U__gnu_linux__", f"-I{NATIVE}"]


def test_callers_helpers_and_forks_race_for_nothing(tmp_path: Path) -> None:
    program = tmp_path / "stress"
    subprocess.run(
        [*GCC, "-fsanitize=thread", STRESS, NATIVE / "parallel.c", NATIVE / "core.c", "-o", program], check=True
    )
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0 exitcode=66"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
