"""The three global generators (torch, NumPy, `random`) as streams that can be seeded, paused and resumed.

They belong to the process, not to a thread. Before a shard's or a sample's code runs, its stream is made the current
one; what it draws is then a function of its seed alone.
"""

import ctypes
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["Stream", "derive", "on_host", "preserved", "seed_all"]


def derive(purpose: str, *numbers: int) -> int:
    """A 63-bit seed for a purpose and numbers such as (seed, step, shard)."""
    text = "|".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int, *, device: bool = True) -> None:
    """Seed the current generators and, unless told otherwise, the current CUDA device's if CUDA is in use."""
    torch.default_generator.manual_seed(seed)
    if device and _cuda_in_use():
        torch.cuda.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch leaves it untyped


class Ahead:
    """The normal number that NumPy has drawn ahead, if any: it draws two at a time, and keeps one beside its bits.

    Asking NumPy takes long, so it is asked only if the bit generator has moved since it was known that there is none.

    Args:
        bits: The bit generator.
    """

    def __init__(self, bits: Any) -> None:
        is_known = isinstance(bits, np.random.MT19937)
        self._words = (ctypes.c_uint32 * 625).from_address(bits.ctypes.state_address) if is_known else None
        self._without: tuple[int, int] | None = None  # where the bit generator was when there was none
        self._state: dict[str, Any] | None = None

    def _place(self) -> tuple[int, int] | None:
        """Where the bit generator is: how far in its words, and the first, which changes when they are used up."""
        return None if self._words is None else (self._words[624], self._words[0])

    def begins(self) -> None:
        """The generator was seeded just now."""
        self._state, self._without = None, self._place()

    def pause(self) -> None:
        """Remember the number; the bit generator is the current one of the process."""
        place = self._place()
        if place is None or place != self._without:
            state: Any = np.random.get_state(legacy=False)
            self._state = state if state["has_gauss"] else None
            self._without = None if self._state else place

    def resume(self) -> None:
        """Give it back: the bit generator has just been made the current one, which made NumPy forget the number."""
        if self._state is not None:
            np.random.set_state(self._state)


class Stream:
    """One sequence of random numbers that others may interrupt.

    Args:
        bits: NumPy's bit generator for it, if there already is one.
        device: While a CUDA graph is captured, the generator that it uses on the device; every replay draws from it,
            with a seed that is set at that time.
    """

    def __init__(self, bits: Any = None, device: torch.Generator | None = None) -> None:
        self._seed: int | None = None
        self._bits = bits if bits is not None else np.random.MT19937(0)
        self._device = device
        self._state: tuple[Any, ...] | None = None
        self._ahead = Ahead(self._bits)

    def has(self, bits: Any) -> bool:
        """Whether it has this bit generator of NumPy's."""
        return self._bits is bits

    def reseed(self, seed: int) -> None:
        """Start again from `seed` at the next `resume`."""
        self._seed, self._state = seed, None

    def resume(self) -> None:
        """Make this stream the current one of the process."""
        np.random.set_bit_generator(self._bits)  # type: ignore[attr-defined]  # NumPy's stubs lack it
        if self._device is not None:
            torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(self._device)
        if self._state is None:
            assert self._seed is not None, "a stream is seeded before it is used"
            seed_all(self._seed, device=self._device is None)
            self._ahead.begins()
            return
        self._ahead.resume()
        cpu, cuda, python = self._state
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        random.setstate(python)

    def pause(self) -> None:
        """Remember the position of this stream, which is the current one."""
        cuda = torch.cuda.get_rng_state() if _cuda_in_use() and self._device is None else None
        self._state = (torch.default_generator.get_state(), cuda, random.getstate())
        self._ahead.pause()


def on_host() -> tuple[Any, ...]:
    """The state of the host's generators; two are equal only if nothing was drawn in between."""
    numpy: Any = np.random.get_state()
    return torch.default_generator.get_state().numpy().tobytes(), numpy[1].tobytes(), numpy[2:], random.getstate()


_spare = np.random.MT19937(0)  # in use while the caller's own is put aside
_outer: Stream | None = None


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the caller's generators afterwards. Does not nest: inside, there is nothing to preserve."""
    global _outer
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # NumPy's stubs lack it
    if _outer is None or not _outer.has(bits):
        _outer = Stream(bits)
    outer = _outer
    outer.pause()
    # Seeding changes a generator in place, so the caller's is put aside.
    np.random.set_bit_generator(_spare)  # type: ignore[attr-defined]  # NumPy's stubs lack it
    try:
        yield
    finally:
        outer.resume()
