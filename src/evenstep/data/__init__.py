"""Which samples a step sees, and how a worker loads those of its own shards."""

from evenstep.data.streams import Streamed, stream

__all__ = ["Streamed", "stream"]
