"""`evenstep trace`: where the time of a step goes, and who waits for whom, from what `evenstep run --trace` wrote."""

import argparse
import json
from pathlib import Path
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.picture import timeline

__all__ = ["add_parser", "events_of"]


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "trace",
        help="show where the time of a traced run went",
        description="Show where the time of a step goes, and which worker waits for which, from a file that "
        "`evenstep run --trace FILE` has written. To see every span, open the file in ui.perfetto.dev or in "
        "chrome://tracing.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="what `evenstep run --trace FILE` has written")
    parser.set_defaults(command=_trace)


def _trace(options: argparse.Namespace) -> int:
    events = events_of(options.file)
    try:
        print(timeline.render(timeline.read(events), timeline.requests(events)))
        if not timeline.has_ended(events):
            print("\nthe end of the run is not in it: the run goes on, or was killed")
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{options.file} has events that evenstep did not write ({error!r})") from error
    return 0


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events of a trace.

    Raises:
        ConfigError: The file holds no trace.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; name a file that run --trace has written"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not a trace, since it is not JSON ({error}); name a file that run --trace has written"
        ) from error
    facts = found.get("otherData") if isinstance(found, dict) else None
    if not isinstance(facts, dict) or facts.get("evenstep trace") != 1:
        raise ConfigError(f"{path} is not a trace of a run; name a file that `evenstep run --trace FILE` has written")
    events: list[dict[str, Any]] = found["traceEvents"]
    return events
