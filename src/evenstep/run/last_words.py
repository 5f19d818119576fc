"""Values that a script logs after its last step."""

from evenstep.engine.logged import mean_of_all
from evenstep.engine.step import Engine
from evenstep.exchange.figures import LOGGED
from evenstep.exchange.journal import Entry
from evenstep.run.saving import Perform

__all__ = ["log_last"]


def log_last(engine: Engine, perform: Perform) -> None:
    """Share values that no step will carry any more. All workers must call this alike, with the same names logged."""
    mine, group = engine.logged.values, engine.group
    if not mine:
        return

    def attempt() -> Entry:
        of_all = group.gather_json(LOGGED, mine)
        return Entry(LOGGED, [engine.version, mean_of_all(of_all)])

    perform(LOGGED, attempt, lambda _, __: engine.logged.settle())
