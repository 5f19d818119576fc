"""Which samples a step sees, and how a worker loads those of its own shards."""
