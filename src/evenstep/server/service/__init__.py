"""Requests to replies, the same for every transport."""
