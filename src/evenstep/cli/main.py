"""The command line: parse, check, hand over. Each of our errors has an exit code and one sentence."""

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evenstep.arithmetic import settings
from evenstep.cli import doctor, graph, groups, machines, on, status, topo, trace
from evenstep.core import env
from evenstep.core.config import ARITHMETICS, DEFAULT_SHARDS, MAX_SHARDS
from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.core.importing import importing
from evenstep.core.output import complete_streams, say

__all__ = ["main"]

_FLAGS = frozenset({"-h", "--help", "--no-replace", "--resume", "-m", "--module"})  # options of `run` without a value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    complete_streams()
    options = _parser().parse_args(_with_port(list(sys.argv[1:] if argv is None else argv)))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot draw the lines of a tree shows question marks
    try:
        return int(options.command(options))
    except EvenstepError as error:
        if not error.was_shown:
            say(str(error))
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output is gone: discard what is buffered
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            raise
        say(
            f"{error.strerror}: this machine, or a limit of this user, does not let it go on; see `evenstep doctor`, "
            "and `ulimit -n` (open files), `ulimit -u` (processes), `ulimit -v` (memory)"
        )
        return 1
    except KeyboardInterrupt:
        say("stopped by SIGINT")
        return 128 + signal.SIGINT


def _with_port(argv: list[str]) -> list[str]:
    """`run --page SCRIPT` means any port, though argparse would take the script for one."""
    place = 1
    while argv[:1] == ["run"] and place < len(argv) and argv[place].startswith("-"):
        word, place = argv[place], place + 1
        if word == "--page" and not (place < len(argv) and argv[place].isdigit()):
            return [*argv[:place], "0", *argv[place:]]
        place += word not in _FLAGS and "=" not in word  # the option's value
    return argv


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; expected a number from 0 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evenstep", description="Data-parallel training whose result does not depend on the number of workers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    machines.add_join(commands)
    status.add_parsers(commands)
    _add_verify(commands)
    doctor.add_parser(commands)
    topo.add_parser(commands)
    graph.add_parser(commands)
    trace.add_parser(commands)
    _add_server(commands.add_parser(
        "server",
        help="serve the parameters of a model to workers that train it",
        description="Serve the parameters of a model to workers, over HTTP, a raw socket and shared memory.",
    ))  # fmt: skip
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a script on several workers of this machine",
        description="Run a script on several workers of this machine; the weights are the same for any number of them. "
        "What follows the script is handed to it.",
    )
    run.add_argument(
        "-n",
        "--workers",
        metavar="N",
        help="number of workers, or auto: one for each GPU, or core if there is none (default)",
    )
    run.add_argument(
        "--shards", metavar="K", type=int, help=f"parts of every batch (default: the script's, or {DEFAULT_SHARDS})"
    )
    run.add_argument(
        "--arithmetic", choices=ARITHMETICS, help="portable: the same bits on every processor (default: the script's)"
    )
    run.add_argument("--log-dir", metavar="DIR", type=Path, help="also write each worker's output to DIR/worker-N.log")
    _add_faults(run)
    _add_figures(run)
    groups.add_arguments(run)
    machines.add_arguments(run)
    on.add_arguments(run)
    run.set_defaults(command=_run)
    _add_script(run)


def _add_faults(run: argparse.ArgumentParser) -> None:
    """Options for workers that fail, are slow or compute wrong, and for the end of a run."""
    run.add_argument(
        "--max-restarts", metavar="N", type=int, help="replace at most this many failed workers (default: any number)"
    )
    run.add_argument(
        "--no-replace", action="store_true", help="replace no worker that fails: go on with those that are left"
    )
    run.add_argument(
        "--step-timeout",
        metavar="SECONDS",
        type=float,
        help="give up and replace a worker that is stuck for this long (default: the script's, or 300)",
    )
    run.add_argument(
        "--weights", metavar="W,W,...", help="how much each worker does, such as 2,1,1 (default: measured)"
    )
    run.add_argument("--resume", action="store_true", help="go on from the script's newest good checkpoint")
    run.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="time to finish the step and save after the first SIGINT or SIGTERM (default: 30)",
    )
    run.add_argument(
        "--recheck",
        metavar="N",
        type=int,
        help="compute one of N steps twice, by different workers, to find one that computes wrong (default: the "
        "script's, or never)",
    )
    run.add_argument(
        "--tolerate-wrong",
        metavar="N",
        type=int,
        help="how often a worker may compute wrong before it is dismissed (default: the script's, or 0)",
    )


def _add_figures(run: argparse.ArgumentParser) -> None:
    """Options for watching a run."""
    run.add_argument("--page", metavar="PORT", type=_port, help="serve a page of the run on this machine (0: any port)")
    run.add_argument(
        "--trace", metavar="FILE", type=Path, help="write what every worker did when to FILE, for Perfetto"
    )
    run.add_argument("--log-json", metavar="FILE", type=Path, help="append a line of JSON for every step to FILE")
    run.add_argument("--tensorboard", metavar="DIR", type=Path, help="write losses, metrics and what is logged to DIR")


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="run a script on several numbers of workers and compare every step",
        description="Run a script on several numbers of workers, compare weights, buffers and optimizer state after "
        "every step, and name the first step and tensor that differ.",
    )
    verify.add_argument(
        "--workers", metavar="N,N,...", default="1,2,4", help="numbers of workers to compare (default: 1,2,4)"
    )
    verify.add_argument("--steps", metavar="S", type=int, help="end the batches after this many steps")
    verify.add_argument("--shards", metavar="K", type=int, help="as for run")
    verify.add_argument("--arithmetic", choices=ARITHMETICS, help="as for run")
    verify.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=3600.0, help="how long each run may take (default: 3600)"
    )
    verify.set_defaults(command=_verify)
    _add_script(verify)


def _add_script(command: argparse.ArgumentParser) -> None:
    """Add the script and its arguments, after all options of the command."""
    own = {text for action in command._actions for text in action.option_strings}
    command.set_defaults(own=own)
    command.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for `python -m`"
    )
    command.add_argument("script", help="the training script")
    command.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")


def _add_server(server: argparse.ArgumentParser) -> None:
    server.add_argument("model", metavar="FILE:FUNCTION", help="what builds the model, or (model, optimizer)")
    server.add_argument("--host", default="127.0.0.1", help="where to listen; beyond loopback a token is needed")
    server.add_argument("--port", metavar="N", type=int, default=0, help="port of HTTP; the raw socket gets the next")
    server.add_argument(
        "--staleness", metavar="S", default="0", help="0: synchronous (default); S: at most S ahead; none: asynchronous"
    )
    server.add_argument("--no-lock", action="store_true", help="clients in shared memory update without asking")
    server.add_argument(
        "--workers", metavar="N", type=int, default=1, help="how many make a synchronous update, at least"
    )
    server.add_argument("--transports", default="http,tcp,memory", help="ways to reach it (default: http,tcp,memory)")
    server.add_argument("--token-file", metavar="FILE", type=Path, help="holds the secret that requests must carry")
    server.add_argument("--certfile", metavar="FILE", help="for TLS")
    server.add_argument("--keyfile", metavar="FILE", help="its key")
    server.add_argument("--directory", metavar="DIR", type=Path, help="where snapshots go, and where to go on from")
    server.add_argument(
        "--snapshot-every", metavar="N", type=int, default=1000, help="updates between two snapshots (default: 1000)"
    )
    server.add_argument("--durable", action="store_true", help="acknowledge an update only once it is on disk")
    server.add_argument(
        "--set-aside", action="store_true", help="start even if the log cannot be replayed; keep the rest of it aside"
    )
    server.add_argument(
        "--servers", metavar="N", type=int, default=1, help="processes that share the parameters, on the next ports"
    )
    server.add_argument("--lease", metavar="SECONDS", type=float, default=30.0, help="drop a worker silent this long")
    server.add_argument("--log-every", metavar="SECONDS", type=float, help="also write the server's figures to the log")
    server.add_argument("--reject-nonfinite", action="store_true", help="refuse updates with infinities or NaN")
    server.add_argument(
        "--threads", metavar="N", type=int, default=1, help="threads of the optimizer (default: 1, as in a run)"
    )
    server.set_defaults(command=_server)


def _server(options: argparse.Namespace) -> int:
    if options.staleness != "none" and not options.staleness.isdigit():
        raise ConfigError(f"--staleness {options.staleness}, expected a whole number, or none")
    if options.threads < 1:
        raise ConfigError(f"--threads {options.threads}, expected a whole number above 0")
    if options.servers > 1 and options.threads > 1:
        raise ConfigError(
            f"--threads {options.threads}, expected 1: each of --servers {options.servers} has one thread"
        )
    path = options.model.rpartition(":")[0]
    if not Path(path or options.model).is_file():
        raise ConfigError(
            f"there is no file {path or options.model}; say what builds the model, such as model.py:build"
        )
    from evenstep.cli.server import serve  # here: importing torch takes seconds, a typo should not

    return serve(options, None if options.staleness == "none" else int(options.staleness))


def _run(options: argparse.Namespace) -> int:
    script = _script(options)
    _note_misplaced(options)
    if options.on is not None:
        return on.run_on(options, script, options.workers)
    setup = groups.setup_of(options)
    num_workers = _num_workers((options.workers or "auto") if setup is None else str(setup.workers), options.shards)
    weights = _weights(options.weights, num_workers)
    _check_numbers(options)
    settings.choose(options.arithmetic)
    with importing():
        from evenstep.launch.job import Job
        from evenstep.launch.supervisor import supervise  # here: importing torch takes seconds, a typo should not

    job = Job(
        script,
        tuple(options.args),
        num_workers,
        options.shards,
        options.log_dir,
        0 if options.no_replace else options.max_restarts,
        options.step_timeout,
        options.grace,
        weights,
        options.resume,
        recheck=options.recheck,
        tolerate_wrong=options.tolerate_wrong,
        log_json=options.log_json,
        tensorboard=options.tensorboard,
        trace=options.trace,
        page=options.page,
        listen=machines.listen_of(options),
    )
    if setup is not None and setup.servers:
        from evenstep.launch.groups import conduct  # here: it imports torch, like the supervisor

        return conduct(job, setup)
    if setup is not None:
        say(setup.describe())
    return supervise(job)


def _check_numbers(options: argparse.Namespace) -> None:
    counts = (("--recheck", options.recheck), ("--tolerate-wrong", options.tolerate_wrong))
    for name, value in (("--max-restarts", options.max_restarts), ("--grace", options.grace), *counts):
        if value is not None and value < 0:
            raise ConfigError(f"{name} {value:g}, expected a number that is not negative")
    if options.step_timeout is not None and not options.step_timeout > 0:
        raise ConfigError(f"--step-timeout {options.step_timeout:g}, expected a number of seconds above 0")


def _weights(text: str | None, num_workers: int) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        weights = tuple(float(word) for word in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != num_workers or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(f"--weights {text}, expected {num_workers} numbers above 0, one for each worker")
    return weights


def _verify(options: argparse.Namespace) -> int:
    script = _script(options)
    _note_misplaced(options)
    counts = [_num_workers(text, options.shards) for text in options.workers.split(",")]
    if len(counts) < 2:
        raise ConfigError(f"--workers {options.workers} is one number; expected at least two to compare, such as 1,2,4")
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}, expected a whole number above 0")
    if not options.timeout > 0:
        raise ConfigError(f"--timeout {options.timeout:g}, expected a number of seconds above 0")
    settings.choose(options.arithmetic)  # the runs find it in their environment
    from evenstep.cli.verify import verify  # here: it imports torch

    return verify(script, options.args, counts, options.steps, options.shards, options.timeout)


def _script(options: argparse.Namespace) -> Path | str:
    """The script to run; a string is the name of a module."""
    if options.module:
        name: str = options.script
        sys.path.insert(0, str(Path.cwd()))  # as workers will do
        if not all(map(str.isidentifier, name.split("."))) or find_spec(name.partition(".")[0]) is None:
            raise ConfigError(f"there is no module {name}; name one that can be imported from here")
        return name
    script = Path(options.script)
    if not script.is_file():
        raise ConfigError(f"there is no script {script}; name a Python file to run")
    return script


def _note_misplaced(options: argparse.Namespace) -> None:
    """Note options of ours that follow the script: they go to the script, which may not be what was meant."""
    for word in options.args:
        if (name := word.partition("=")[0]) in options.own - {"-h", "--help"}:
            say(
                f"{name} comes after {options.script}, so it goes to the script; if it is meant for evenstep, put it "
                "before"
            )


def _num_workers(text: str, shards: int | None) -> int:
    if shards is not None and not 1 <= shards <= MAX_SHARDS:
        raise ConfigError(f"--shards {shards}, expected a whole number from 1 to {MAX_SHARDS}")
    if text == "auto":
        return min(env.num_gpus() or len(os.sched_getaffinity(0)), shards or DEFAULT_SHARDS)
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number of workers; expected a whole number above 0, or auto") from None
    if number < 1:
        raise ConfigError(f"{number} workers, expected at least 1, or auto")
    if shards is not None and number > shards:
        raise ConfigError(f"{number} workers but only {shards} shards: every worker needs one; use at most -n {shards}")
    if number > MAX_SHARDS:
        raise ConfigError(f"{number} workers, but a run has at most {MAX_SHARDS} shards and every worker needs one")
    return number
