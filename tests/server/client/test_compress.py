"""What a client does to updates before it sends them."""

import pytest
import torch

from evenstep.core.errors import ConfigError
from evenstep.server.client.compress import Compressor
from evenstep.server.wire.tensors import INDICES, VALUES


def test_without_options_nothing_is_done():
    tensors = {"w": torch.randn(3)}
    assert Compressor(False, None).pack(tensors) is tensors


@pytest.mark.parametrize("bfloat16", [False, True])
def test_what_is_sent_and_what_is_held_back_add_up(bfloat16):
    compressor, total, sent = Compressor(bfloat16, 0.1), torch.zeros(50), torch.zeros(50)
    for seed in range(5):
        gradient = torch.randint(-99, 99, (5, 10), generator=torch.Generator().manual_seed(seed)).float()
        packed = compressor.pack({"w": gradient, "n": torch.tensor([seed])})
        indices, values = packed["w" + INDICES], packed["w" + VALUES]
        assert len(indices) == 5
        assert bool((indices.diff() > 0).all())
        assert values.dtype == (torch.bfloat16 if bfloat16 else torch.float32)
        assert int(packed["n"]) == seed, "whole numbers are sent as they are"
        sent[indices] += values.float()
        total += gradient.flatten()
    assert torch.equal(sent + compressor.residual["w"], total)


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="expected a fraction above 0 and at most 1"):
        Compressor(False, share)
