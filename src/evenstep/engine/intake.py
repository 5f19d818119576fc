"""Taking models and optimizers into a run, alike on all workers."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from evenstep.core.errors import ConfigError
from evenstep.engine.holdings import Holdings
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.engine.sharing import Sharing
from evenstep.engine.updates import Updates
from evenstep.exchange.journal import Entry
from evenstep.exchange.ledger import Operation

__all__ = ["Intake"]


class Intake:
    """Takes in what a run trains. All workers must call everything here alike.

    Args:
        holdings: Where it goes.
        updates: Says what can be trained.
        sharing: Lays out gradients.
        forget: Called when the models have changed.
    """

    def __init__(self, holdings: Holdings, updates: Updates, sharing: Sharing, forget: Callable[[], None]) -> None:
        self._holdings, self._updates, self._sharing, self._forget = holdings, updates, sharing, forget

    def prepare(self, model: nn.Module, optimizer: Optimizer | None, *, whole: bool = False) -> None:
        """Take a model, and the optimizer that trains it, into the run.

        Args:
            model: The model.
            optimizer: The optimizer, if any.
            whole: Whether the optimizer looks at all parameters at once, so that one worker steps them.

        Raises:
            ConfigError: The optimizer is prepared already.
            UnsupportedError: They cannot be trained exactly.
            MismatchError: Another worker prepares something else.
        """
        holdings = self._holdings
        if any(known.optimizer is optimizer for known in holdings.optimizers):
            raise ConfigError(f"this {type(optimizer).__name__} is prepared already; prepare every optimizer once")
        if whole:
            self._updates.refuse("whole optimizer")
        self._updates.admit(model, optimizer)
        added = holdings.models.add(model)
        self._forget()
        prepared = None if optimizer is None else holdings.add(optimizer, whole=whole)
        if prepared is not None:
            self._sharing.lay_out(prepared)

        def attempt() -> Entry:
            holdings.models.agree(added)
            news = prepared.agree() if prepared else []
            holdings.group.barrier("state moved")
            return Entry("prepare", news)

        def adopt(entry: Entry, took_part: bool) -> None:
            holdings.models.bind(added)
            if prepared is not None:
                prepared.adopt(entry.value, took_part)
            holdings.settle()

        holdings.ledger.perform(Operation("prepare", holdings.version), attempt, adopt)
        self._updates.join(model, prepared)

    def take_in_added(self, prepared: PreparedOptimizer) -> None:
        """Train what user code has added to an optimizer since it was prepared, if anything.

        Raises:
            UnsupportedError: That cannot be done in this kind of run; or the parameters are in no prepared model.
            MismatchError: Another worker has added something else.
        """
        added = prepared.added()
        if not added:
            return
        self._updates.refuse("added parameters")
        prepared.extend(added, self._holdings.names)
        self._sharing.lay_out(prepared)
        kind = "parameters added"

        def attempt() -> Entry:
            prepared.compare(kind)
            return Entry(kind)

        self._holdings.ledger.perform(Operation(kind, self._holdings.version), attempt, lambda *_: None)
