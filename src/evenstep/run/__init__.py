"""The facade that a user calls."""
