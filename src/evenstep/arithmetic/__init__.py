"""The same bits on every processor: what is set for that, what our own kernels compute, and what is refused.

Importing it does nothing and brings no torch; `settings` comes before torch, the rest after it.
"""
