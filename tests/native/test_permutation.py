"""The order of an epoch's samples is the one that torch.randperm gives."""

import pytest
import torch

from evenstep.native import core


@pytest.mark.parametrize("count", [0, 1, 2, 100, 623, 624, 625, 1248, 1249, 100_003])
def test_it_is_what_torch_gives(count):
    for seed in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1):
        expected = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        found = torch.full((count + 1,), -1)
        core.permutation(found.data_ptr(), count, seed & 0xFFFFFFFF)
        assert torch.equal(found[:count], expected)
        assert found[count] == -1, "nothing behind it is touched"
