"""An edit is carried out by one worker and reaches all, or, if the updates refuse it, changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from workshop import Batch, Worker, network, samples

from evenstep.core.errors import UnsupportedError
from evenstep.engine.editing import edit
from evenstep.engine.updates import OwnUpdates


class Noting(OwnUpdates):
    """Notes what it is asked."""

    def __init__(self, group):
        super().__init__(group)
        self.asked = []

    def edited(self):
        self.asked.append("edited")

    def abandon(self):
        self.asked.append("abandon")


def test_an_edit_reaches_updates_only_if_it_is_allowed(holdings_of):
    (holdings,) = holdings_of()
    model = network()
    with Worker(holdings, model, torch.optim.Adam(model.parameters(), 0.05), Noting(holdings.group)) as here:
        here.step(Batch(*samples()), lambda part: F.cross_entropy(model(part[0]), part[1]))
        here.engine.updates.asked.clear()
        edit(here.holdings, here.engine.updates, lambda: here.model[0].bias.zero_(), 5)
        assert here.engine.updates.asked == ["edited"]
        assert (here.model[0].bias == 0).all()

        def refuse(what):
            raise UnsupportedError(what)

        here.engine.updates.refuse = refuse
        here.engine.updates.asked.clear()
        before = here.holdings.state.fingerprint()
        with pytest.raises(UnsupportedError, match="edited optimizer"):
            edit(here.holdings, here.engine.updates, lambda: here.prepared.optimizer.state.clear(), 6)
        assert here.engine.updates.asked == ["abandon"]
        assert here.holdings.state.fingerprint() == before
