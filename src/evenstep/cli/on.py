"""`evenstep run --on ray`: the same command on the nodes of a cluster."""

import argparse
import signal
import sys
from pathlib import Path

from evenstep.core.errors import ConfigError
from evenstep.core.output import unheard

__all__ = ["add_arguments", "run_on"]

_GRACE_S = 30.0  # the default of --grace
_FIGURES = ("trace", "log_json", "tensorboard", "page")
_TAKEN = {"on", "workers", "shards", "max_restarts", "no_replace", "step_timeout", "resume", *_FIGURES}
_OURS = {"command", "own", "module", "script", "args"}  # what the parser itself adds


def add_arguments(run: argparse.ArgumentParser) -> None:
    """Add the option that says on which machines to run."""
    run.add_argument(
        "--on",
        metavar="CLUSTER",
        help="ray: on the cluster at RAY_ADDRESS, or this machine's; ray://HOST:PORT: on that one (default: here)",
    )


def run_on(options: argparse.Namespace, script: Path | str, workers: str | None) -> int:
    """Run a script on a cluster; returns the exit code.

    Raises:
        ConfigError: There is no such kind of cluster, or an option belongs to one machine.
    """
    num_workers = _check(options, script, workers)
    from evenstep import ray  # here: importing it takes seconds, and it may not be installed

    run = ray.run  # which imports Ray, and that has its own way to end on SIGTERM
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as on one machine: like Ctrl-C
    try:
        run(
            script,
            *options.args,
            workers=num_workers,
            address=None if options.on == "ray" else options.on,
            shards=options.shards,
            max_restarts=0 if options.no_replace else options.max_restarts,
            step_timeout_s=options.step_timeout,
            resume=options.resume,
            **{name: getattr(options, name) for name in _FIGURES},
            working_dir=str(Path(script).resolve().parent),
        )
    except ray.ScriptError as error:
        with unheard(sys.stderr):
            print(error, file=sys.stderr, flush=True)  # a traceback, as on one machine
        return error.exit_code
    except KeyboardInterrupt as stop:
        if not stop.args:  # before there was a run
            raise
        return int(stop.args[0])
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _check(options: argparse.Namespace, script: Path | str, workers: str | None) -> int:
    """Check that the options have a meaning on a cluster; return the number of workers."""
    cluster: str = options.on
    if cluster != "ray" and not cluster.startswith("ray://"):
        raise ConfigError(f"--on {cluster}, expected ray, or ray://HOST:PORT")
    for name, value in vars(options).items():
        is_given = value is not None and value is not False and (name, value) != ("grace", _GRACE_S)  # 0 is given
        if name not in _TAKEN | _OURS and is_given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} applies to one machine and has no meaning with --on {cluster}; leave it out")
    if not isinstance(script, Path):
        raise ConfigError(f"-m {script} with --on {cluster}, expected the path of a script")
    if workers is None or not workers.isdigit() or int(workers) < 1:
        raise ConfigError(f"-n {workers} with --on {cluster}, expected a number of workers: -n 8")
    return int(workers)
