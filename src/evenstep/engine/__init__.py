"""Shards taking turns, gradients, owners, and the step as a transaction."""
