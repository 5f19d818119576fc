"""The last operation of a run: all workers are done, and one fingerprint sums up the result."""

import sys
from collections.abc import Callable

from evenstep.core.env import Environment
from evenstep.core.events import send
from evenstep.core.output import unheard
from evenstep.engine.step import Engine
from evenstep.exchange.journal import Entry
from evenstep.run.digests import DigestWriter
from evenstep.run.meter import Meter
from evenstep.run.operations import RunOperations

__all__ = ["end"]


def end(
    engine: Engine,
    operations: RunOperations,
    fingerprint: Callable[[], str],
    meter: Meter,
    digests: DigestWriter,
    env: Environment,
) -> None:
    """Wait for all workers, and show the fingerprint, unless the run is quiet. All workers must call this alike."""
    group = engine.group

    def attempt() -> Entry:
        group.barrier("end of the run")
        return Entry("end of the run", fingerprint() if group.rank == 0 else None)

    def adopt(entry: Entry, took_part: bool) -> None:
        if not took_part:  # a worker that came here through the journal alone takes over the result
            engine.holdings.pull()
        meter.close()
        found = entry.value or fingerprint()
        digests.end(found)
        if engine.config.quiet:
            return
        if env.events_fd is not None:
            send(env.events_fd, {"fingerprint": found, "operation": engine.ledger.done})
        elif group.rank == 0:
            with unheard(sys.stdout):
                print(f"fingerprint {found}", flush=True)

    operations.perform("end of the run", attempt, adopt)
