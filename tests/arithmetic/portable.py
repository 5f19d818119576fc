"""A process whose torch has chosen portable kernels, which it does but once: it runs command lines in forks of itself.

Started as a program, it reads one as JSON from each line of its standard input, and says what became of it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evenstep.arithmetic.settings import PORTABLE

TESTS = Path(__file__).parents[1]


class Portable:
    """The process, for those who use it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, *argv: str | Path) -> tuple[int, str, str]:
        """What `evenstep` does with arguments: its exit code, standard output and standard error."""
        print(json.dumps([str(arg) for arg in argv]), file=self._process.stdin, flush=True)
        code, out, err = json.loads(self._process.stdout.readline())
        return code, out, err


@contextmanager
def opened(*folders: Path) -> Iterator[Portable]:
    """Have one, which finds modules in these folders."""
    path = os.pathsep.join(map(str, filter(None, (*folders, TESTS, os.environ.get("PYTHONPATH")))))
    environment = {**os.environ, **PORTABLE, "PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__], env=environment, **pipes) as process:
        yield Portable(process)


def serve() -> None:
    """Be the process."""
    import torch._inductor.config  # noqa: F401  # takes a second, which every worker would spend in its first step

    from workers import cli_run

    for line in sys.stdin:
        done = cli_run(*json.loads(line), timeout_s=280.0)
        print(json.dumps([done.code, done.stdout, done.stderr]), flush=True)


if __name__ == "__main__":
    serve()
