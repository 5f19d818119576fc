"""The test kit for several processes: workers forked around one segment, and the command line.

All but `script_run` fork the pytest process, in which torch is imported already, so a worker costs milliseconds and the
body may be any closure. Whatever a helper started is gone when it returns, however it returns.
"""

import atexit
import contextlib
import faulthandler
import importlib
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _pytest.pathlib import cleanup_numbered_dir

import processes
from evenstep.cli.main import main
from evenstep.core import env
from evenstep.native import core
from evenstep.transport.segment import Segment

for _name in (  # what a fork would import: now, and not in every one
    "encodings.idna",
    "evenstep.launch.groups",
    "evenstep.launch.supervisor",
    "evenstep.picture.machines",
    "evenstep.picture.trace",
    "evenstep.run.run",
    "evenstep.server.transports.http",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
    "numpy.ctypeslib",
):
    importlib.import_module(_name)
with torch.autograd.profiler.record_function("as an optimizer's step does, for the same reason"):
    pass

_FINALIZERS: list[Any] = []
_OTHERS = [0]  # how many threads Python does not know of


@dataclass(frozen=True)
class Outcome:
    """How one worker ended.

    Attributes:
        value: What the body returned.
        kind: The name of the exception's class; "Killed" if it ended without a word; None if all went well.
        text: The exception with its traceback, notes and causes.
        exit_code: 0; what the launcher's worker would exit with; or minus the signal that killed it.
    """

    value: Any = None
    kind: str | None = None
    text: str = ""
    exit_code: int = 0


class WorkersFailed(AssertionError):
    """Some worker did not return. `outcomes` says how each of them ended."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        texts = [f"worker {n} ({o.kind}, exit code {o.exit_code}):\n{o.text}" for n, o in enumerate(outcomes) if o.kind]
        super().__init__("\n".join(texts))
        self.outcomes = outcomes


def run_workers(
    num_workers: int, body: Callable[[int], Any], timeout_s: float = 100.0, *, shards: int | None = None
) -> list[Any]:
    """Run `body(worker)` in so many workers of one run; return what they returned, in worker order.

    `evenstep.Run()` in the body finds its place by itself; `inherited_segment()` gives the bare segment.

    Args:
        num_workers: How many processes to fork.
        body: Called in each with its number. What it returns must be picklable.
        timeout_s: Then all are killed, after each has written its stack to standard error.
        shards: As `--shards` on the launcher's command line.

    Raises:
        WorkersFailed: A worker raised, exited or was killed.
    """
    outcomes = run_outcomes(num_workers, body, timeout_s, shards=shards)
    if any(outcome.kind for outcome in outcomes):
        raise WorkersFailed(outcomes)
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    num_workers: int, body: Callable[[int], Any], timeout_s: float = 100.0, *, shards: int | None = None
) -> list[Outcome]:
    """As `run_workers`, but a worker that fails is an `Outcome` like any other."""
    segment = Segment.create(num_workers)
    try:
        places = [env.worker_variables(w, num_workers, shards, segment.fd, -1) for w in range(num_workers)]
        return outcomes_of(places, body, timeout_s)
    finally:
        segment.close()


def outcomes_of(places: Sequence[dict[str, str]], body: Callable[[int], Any], timeout_s: float) -> list[Outcome]:
    """Run `body(worker)` in a process for each place, given by the variables that tell a worker of it."""
    pids: list[int] = []
    pipes: list[int] = []
    try:
        for worker, variables in enumerate(places):
            reading, writing = os.pipe()
            pipes.append(reading)
            _let_threads_end()
            pid = os.fork()
            if pid == 0:
                _be_worker(worker, variables, writing, body)
            os.close(writing)
            pids.append(pid)
        texts = _read_all(pipes, pids, time.monotonic() + timeout_s)
        return [_outcome(text, _end(pid)) for text, pid in zip(texts, _take(pids), strict=True)]
    finally:
        for pid in pids:
            _end(pid)
        for fd in pipes:
            os.close(fd)


def inherited_segment() -> Segment:
    """The segment that `run_workers` made, in a body."""
    fd = env.read().segment_fd
    assert fd is not None, "only a body of run_workers has inherited a segment"
    return Segment(fd)


def _let_threads_end() -> None:
    """Wait for threads that have returned but are still in the clean-up of a library.

    One may hold a lock there, which a process that is forked just then would inherit, and never get.
    """
    beyond = lambda: len(os.listdir("/proc/self/task")) - threading.active_count()  # noqa: E731  # short
    if beyond() > _OTHERS[-1] and not processes.until(lambda: beyond() <= _OTHERS[-1], 0.5):
        _OTHERS.append(beyond())  # they stay


def _take(pids: list[int]) -> Sequence[int]:
    """Hand out what is in a list, one after the other, so that only what is left remains to be ended."""
    taken, pids[:] = list(pids), []
    return taken


def _be_worker(worker: int, variables: dict[str, str], pipe: int, body: Callable[[int], Any]) -> None:
    outcome = Outcome(kind="Killed", exit_code=1)
    try:
        core.die_with_parent()
        os.setsid()
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        null = os.open(os.devnull, os.O_WRONLY)
        env.write({**variables, "EVENSTEP_EVENTS_FD": str(null)})
        outcome = Outcome(body(worker))
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
        outcome = Outcome(kind="SystemExit", text=str(request.code), exit_code=code)
    except BaseException as error:  # noqa: BLE001  # the border of the process: the test gets it
        text = "".join(traceback.format_exception(error))
        outcome = Outcome(kind=type(error).__name__, text=text, exit_code=getattr(error, "exit_code", 1))
    try:
        data = pickle.dumps(outcome)
    except BaseException as error:  # noqa: BLE001  # as above
        data = pickle.dumps(Outcome(kind=type(error).__name__, text=f"the result cannot be sent: {error}", exit_code=1))
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(pipe, view) :]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(outcome.exit_code & 0xFF)


def _read_all(pipes: Sequence[int], pids: Sequence[int], deadline: float) -> list[bytes]:
    texts = [b""] * len(pipes)
    alive = set(range(len(pipes)))
    gone: set[int] = set()
    while alive:
        left = deadline - time.monotonic()
        if left <= 0:
            for worker in alive:
                os.kill(pids[worker], signal.SIGUSR1)  # faulthandler writes its stack
            time.sleep(0.2)
            raise TimeoutError(f"workers {sorted(alive)} did not end in time; their stacks are on standard error")
        ready = set(select.select([pipes[worker] for worker in alive], [], [], min(left, 0.2))[0])
        for worker in [worker for worker in alive if pipes[worker] in ready]:
            data = os.read(pipes[worker], 1 << 20)
            texts[worker] += data
            if not data:
                alive.discard(worker)
        # one that was killed may have left children behind that hold its pipe open
        alive -= {worker for worker in gone if pipes[worker] not in ready}
        gone |= {worker for worker in alive if not processes.is_alive(pids[worker])}
    return texts


def _end(pid: int) -> int:
    """Kill what is left of a worker's group, then collect the worker: until then nobody else can have its number."""
    for kill in (os.killpg, os.kill):  # it may not have a group of its own yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _outcome(text: bytes, exit_code: int) -> Outcome:
    try:
        return pickle.loads(text)
    except (EOFError, pickle.UnpicklingError):
        return Outcome(kind="Killed", text=f"it ended with exit code {exit_code} and left no word", exit_code=exit_code)


@dataclass(frozen=True)
class Completed:
    """What a command left.

    Attributes:
        code: Its exit code; minus the number of the signal that killed it.
        stdout: Its standard output; bytes that are no UTF-8 are replaced.
        stderr: Its standard error, likewise.
        raw: Its standard output, as it came.
    """

    code: int
    stdout: str
    stderr: str
    raw: bytes


def script_run(
    *argv: str | Path, timeout_s: float = 100.0, variables: dict[str, str] | None = None, cwd: Path | None = None
) -> Completed:
    """Run `python -m evenstep run ...` as a subprocess: everything is real, and importing torch takes seconds.

    Args:
        argv: What follows `run`: options, the script, its arguments.
        timeout_s: Then it is killed with all its descendants and subprocess.TimeoutExpired is raised.
        variables: Set on top of this process's environment.
        cwd: Where it runs.
    """
    command = [sys.executable, "-m", "evenstep", "run", *map(str, argv)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **(variables or {})}, cwd=cwd
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:  # otherwise its number may be another's
            processes.kill_tree(process.pid)
            process.communicate()
    return Completed(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"), out)


def cli_run(*argv: str | Path, timeout_s: float = 100.0, variables: dict[str, str] | None = None) -> Completed:
    """Run the command line (`run`, `verify`, ... and their options) in a fork of this process, so without the wait."""
    with Cli(*argv, variables=variables) as cli:
        return cli.wait(timeout_s)


def python_run(*argv: str | Path, timeout_s: float = 100.0, variables: dict[str, str] | None = None) -> Completed:
    """Run what `python script ...` runs, in a fork of this process: a script that nobody has launched."""
    with Cli(*argv, variables=variables, program=be_python) as cli:
        return cli.wait(timeout_s)


def fork_run(command: Sequence[str], variables: dict[str, str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a command that begins with `python script` or `python -m evenstep` in a fork of this process."""
    ours = list(command[1:3]) == ["-m", "evenstep"]
    done = (cli_run if ours else python_run)(*command[3 if ours else 1 :], timeout_s=timeout_s, variables=variables)
    return subprocess.CompletedProcess(command, done.code, done.stdout, done.stderr)


def be_python(argv: Sequence[str]) -> int:
    """What `python` does with a script and its arguments."""
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")
    return 0


class Cli:
    """A command line that runs in a fork of this process. A context manager: it is gone afterwards.

    Args:
        argv: What the program is given.
        variables: Set on top of this process's environment.
        program: Ours, unless it is said.

    Attributes:
        pid: Its process id.
    """

    def __init__(
        self, *argv: str | Path, variables: dict[str, str] | None = None, program: Callable[[Sequence[str]], int] = main
    ) -> None:
        self._files = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("out", "err")]
        self._code: int | None = None
        self.pid = fork_cli([str(arg) for arg in argv], self._attach, variables, program)

    def _attach(self) -> None:
        os.setsid()
        for fd, file in enumerate(self._files, start=1):
            os.dup2(os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_APPEND), fd)

    def __enter__(self) -> "Cli":
        return self

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            processes.kill_tree(self.pid)
            os.waitpid(self.pid, 0)
        for fd in self._files:
            os.close(fd)

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self._read(0).decode(errors="replace")

    @property
    def stderr(self) -> str:
        """What it has written to standard error so far."""
        return self._read(1).decode(errors="replace")

    def _read(self, which: int) -> bytes:
        fd = self._files[which]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def until_it_says(self, text: str, times: int = 1, timeout_s: float = 60.0) -> None:
        """Wait until a text is on its standard output so many times."""
        said = processes.until(lambda: self.stdout.count(text) >= times, timeout_s)
        assert said, f"it did not say {text!r} {times} times:\n{self.stdout}\n{self.stderr}"

    def kill(self, number: int) -> None:
        """Send a signal to the command line alone."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 100.0) -> Completed:
        """Wait for its end."""
        pidfd = os.pidfd_open(self.pid)
        try:
            ended = select.select([pidfd], [], [], timeout_s)[0]
        finally:
            os.close(pidfd)
        if not ended:
            raise TimeoutError(f"the command did not end within {timeout_s:g} s:\n{self.stdout}\n{self.stderr}")
        self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return Completed(self._code, self.stdout, self.stderr, self._read(0))


def fork_cli(
    argv: Sequence[str],
    attach: Callable[[], None],
    variables: dict[str, str] | None = None,
    program: Callable[[Sequence[str]], int] = main,
) -> int:
    """Run the command line in a fork of this process, with standard streams that `attach` makes; return its pid."""
    _let_threads_end()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        core.die_with_parent()
        attach()
        faulthandler.enable(2)  # pytest's own writes to a descriptor that a worker closes, and may use for memory
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # as long as the process lives
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115  # likewise
        os.environ.update(variables or {})
        _FINALIZERS.append(weakref.finalize._registry)  # kept: a fork that frees what it has inherited copies it first
        weakref.finalize._registry = {}  # workers run exit handlers: our folders are not theirs to remove
        atexit.unregister(cleanup_numbered_dir)
        try:
            code = program(argv)
        except SystemExit as request:
            code = request.code if isinstance(request.code, int) else 0 if request.code is None else 1
        except BaseException:  # noqa: BLE001  # the border of the process
            traceback.print_exc()
            code = 70
        sys.stdout.flush()
    finally:
        os._exit(code)
