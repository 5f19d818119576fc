"""Python imports this first in every process of the cluster."""

import forker

forker.install()
