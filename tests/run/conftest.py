"""The fixtures of `holders`."""

from holders import config, groups_of, holdings_of

__all__ = ["config", "groups_of", "holdings_of"]
