"""Diagnosing a machine: facts, what they mean for a run, which bits it computes, and how two machines compare."""
