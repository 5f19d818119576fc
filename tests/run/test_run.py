"""The facade by itself: a run that is over refuses to go on."""

import pytest
import torch

import evenstep
from evenstep import ConfigError


def test_a_run_is_over_once_and_says_so():
    with evenstep.Run(quiet=True) as opened:
        pass
    opened.close()
    with pytest.raises(ConfigError, match="this run is closed"):
        opened.carry(lambda _: torch.zeros(1))
    with pytest.raises(ConfigError, match="this run is closed"):
        opened.once(lambda: 1)
