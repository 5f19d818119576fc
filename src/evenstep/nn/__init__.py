"""Synchronized batch norm for shards, replicas and process groups, and conversion to and from it."""
