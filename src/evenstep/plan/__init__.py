"""Pure values: the tree over shards, who computes which shard, who owns which parameter."""
