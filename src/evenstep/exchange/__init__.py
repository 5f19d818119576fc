"""The one primitive: every shard offers a vector under a tag, everyone receives the combination."""
