"""`evenstep run`, `evenstep verify`: parse, check, hand over. Each of our errors has an exit code and one sentence."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from evenstep.core.config import DEFAULT_SHARDS, MAX_SHARDS
from evenstep.core.errors import ConfigError, EvenstepError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(argv)
    try:
        return int(options.command(options))
    except EvenstepError as error:
        print(f"evenstep: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("evenstep: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output is gone: what is buffered goes nowhere
        return 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evenstep", description="Data-parallel training whose result does not depend on the number of workers."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run a script on several workers of this machine",
        description="Run a script on several workers of this machine; the weights are the same for any number of them.",
    )
    run.add_argument(
        "-n", "--workers", metavar="N", default="auto", help="number of workers, or auto: one for each core (default)"
    )
    run.add_argument(
        "--shards", metavar="K", type=int, help=f"parts of every batch (default: the script's, or {DEFAULT_SHARDS})"
    )
    run.add_argument("--log-dir", metavar="DIR", type=Path, help="also write each worker's output to DIR/worker-N.log")
    run.set_defaults(command=_run)

    verify = commands.add_parser(
        "verify",
        help="run a script on several numbers of workers and compare every step",
        description="Run a script on several numbers of workers, compare weights, buffers and optimizer state after "
        "every step, and name the first step and tensor that differ.",
    )
    verify.add_argument(
        "--workers", metavar="N,N,...", default="1,2,4", help="numbers of workers to compare (default: 1,2,4)"
    )
    verify.add_argument("--steps", metavar="S", type=int, help="end the batches after so many steps")
    verify.add_argument("--shards", metavar="K", type=int, help="as for run")
    verify.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=3600.0, help="what each run may take (default: 3600)"
    )
    verify.set_defaults(command=_verify)

    for command in (run, verify):
        command.add_argument("script", type=Path, help="the training script")
        command.add_argument("args", nargs=argparse.REMAINDER, help="its own arguments")
    return parser


def _run(options: argparse.Namespace) -> int:
    _check_script(options.script)
    num_workers = _num_workers(options.workers, options.shards)
    from evenstep.launch.supervisor import Job, supervise  # here: importing torch takes seconds, a typo should not

    return supervise(Job(options.script, tuple(options.args), num_workers, options.shards, options.log_dir))


def _verify(options: argparse.Namespace) -> int:
    _check_script(options.script)
    counts = [_num_workers(text, options.shards) for text in options.workers.split(",")]
    if len(counts) < 2:
        raise ConfigError(f"--workers {options.workers} is one number; expected at least two to compare, such as 1,2,4")
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}, expected a whole number above 0")
    if not options.timeout > 0:
        raise ConfigError(f"--timeout {options.timeout:g}, expected a number of seconds above 0")
    from evenstep.cli.verify import verify  # here: as above

    return verify(options.script, options.args, counts, options.steps, options.shards, options.timeout)


def _check_script(script: Path) -> None:
    if not script.is_file():
        raise ConfigError(f"there is no script {script}; name a Python file to run")


def _num_workers(text: str, shards: int | None) -> int:
    if shards is not None and not 1 <= shards <= MAX_SHARDS:
        raise ConfigError(f"--shards {shards}, expected a whole number from 1 to {MAX_SHARDS}")
    if text == "auto":
        return min(len(os.sched_getaffinity(0)), shards or DEFAULT_SHARDS)
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no number of workers; expected a whole number above 0, or auto") from None
    if number < 1:
        raise ConfigError(f"{number} workers, expected at least 1, or auto")
    if shards is not None and number > shards:
        raise ConfigError(f"{number} workers but only {shards} shards: every worker needs one; use at most -n {shards}")
    if number > MAX_SHARDS:
        raise ConfigError(f"{number} workers, but a run has at most {MAX_SHARDS} shards and every worker needs one")
    return number
