"""Python imports this first in every process of the cluster."""

import nursery

nursery.install()
