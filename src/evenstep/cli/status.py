"""`evenstep status` and `evenstep scale`: look at a running job, and change its number of workers."""

import argparse
import json
from typing import Any

from evenstep.core.control import ask

__all__ = ["add_parsers", "described"]


def add_parsers(commands: Any) -> None:
    """Add both commands to the command line."""
    scale = commands.add_parser(
        "scale",
        help="change the number of workers of a running job",
        description="Change the number of workers of a running job at its next step; no bit of the result changes.",
    )
    scale.add_argument("workers", metavar="N", type=int, help="number of workers")
    scale.set_defaults(command=_scale)
    status = commands.add_parser(
        "status",
        help="show the workers of a running job",
        description="Show the workers of a running job: the step that each is in, its shards, and where its time in "
        "steps has gone; machines, the last fault and the last checkpoint.",
    )
    status.add_argument("--json", action="store_true", help="everything that is known, as one JSON object")
    status.set_defaults(command=_status)
    for command in (scale, status):
        command.add_argument("--job", metavar="PID", type=int, help="which job, by the process id of `evenstep run`")


def _scale(options: argparse.Namespace) -> int:
    print(f"evenstep: {ask({'scale': options.workers}, options.job)['said']}")
    return 0


def _status(options: argparse.Namespace) -> int:
    found = ask({"status": True}, options.job)
    print(json.dumps(found) if options.json else "\n".join(described(found)))
    return 0


def described(found: dict[str, Any]) -> list[str]:
    """A job in lines.

    Args:
        found: What its supervisor answers.
    """
    shards = "" if found["num_shards"] is None else f"  shards {found['num_shards']}"
    lines = [
        f"{found['script']}  up {_duration(found['uptime_s'])}{shards}",
        f"generation {found['generation']}  wanted {found['wanted']}  restarts {found['restarts']}",
    ]
    several = len(found["machines"]) > 1
    for machine in found["machines"] if several else ():
        head = "  head" if machine["machine"] == 0 else ""
        lines.append(f"machine {machine['machine']}  {machine['name']}{head}")
    lines += [_worker(worker, several=several) for worker in found["workers"]]
    if found["faults"]:
        ago_s, what, seconds = found["faults"][-1]
        again = "no step committed since" if seconds is None else f"a step committed {seconds:.3f} s later"
        lines.append(f"last fault {_duration(ago_s)} ago: {what}; {again}")
    if found["checkpoints"]:
        ago_s, path = found["checkpoints"][-1]
        lines.append(f"last checkpoint {_duration(ago_s)} ago: {path}")
    return lines


def _worker(worker: dict[str, Any], *, several: bool) -> str:
    words = ["worker {worker}  pid {pid}  step {step}".format(**worker)]
    if several:
        words.append(f"machine {worker['machine']}")
    first, end = worker["shards"]
    if end > first:
        words.append(f"shards {first}" if end == first + 1 else f"shards {first}-{end - 1}")
    seconds = {kind: worker[f"{kind}_s"] for kind in ("compute", "wait", "exchange", "update")}
    if whole := sum(seconds.values()):
        words += [f"{kind} {100 * part / whole:.0f} %" for kind, part in seconds.items()]
    if not worker["member"]:
        words.append("joining")
    return "  ".join(words)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
