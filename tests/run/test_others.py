"""Where nobody else trains the model, what is here is all there is."""

import torch

from evenstep.engine.form import Form
from evenstep.run.others import Nobody


def test_nobody_has_anything_to_add(holdings_of):
    (holdings,) = holdings_of()
    (entry,) = holdings.state.add({"model.a": Form.of(torch.zeros(2))})
    entry.counts = True
    others = Nobody(holdings)
    others.collect()
    others.level("evaluate 0")
    assert others.merge("evaluate 0", {"loss": 0.1}, 7) == {"loss": 0.1}
    assert list(others.tensors()) == ["model.a"]
