"""The surroundings of code that draws samples: random generators of its own, and one intra-op thread."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from evenstep.engine.randomness import Stream, preserved

__all__ = ["drawing"]


@contextmanager
def drawing() -> Iterator[None]:
    """Let the code inside seed and use the global generators; the caller's are restored afterwards."""
    own = Stream()
    own.reseed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with preserved():
            own.resume()  # sets the caller's NumPy generator aside: seeding would change it in place
            yield
    finally:
        torch.set_num_threads(threads)
