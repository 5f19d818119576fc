"""The checksum sees every change, depends on bytes and order alone, and is written down: it may rest in files."""

import random
from itertools import combinations

import numpy as np
import pytest
import torch

from evenstep.native import core


def checksum(data: bytes, offset: int = 0) -> int:
    memory = torch.frombuffer(bytearray(b"x" * offset + data + b"y"), dtype=torch.uint8)
    return core.checksum(memory.data_ptr() + offset, len(data))


def by_the_book(data: bytes) -> int:
    odd, also_odd, mask, total = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, (1 << 64) - 1, 0
    for place, at in enumerate(range(0, len(data), 8), 1):
        word = int.from_bytes(data[at : at + 8], "little") ^ place * odd & mask
        word = (word ^ word >> 32) * odd & mask
        word = (word ^ word >> 29) * also_odd & mask
        total += word ^ word >> 32
    return total & mask ^ len(data)


def test_it_is_what_it_is_written_down_to_be_wherever_the_data_lies():
    for size in (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 1000):
        data = random.Random(size).randbytes(size)
        assert {checksum(data, offset) for offset in (0, 1, 8, 63)} == {by_the_book(data)}


def test_every_flipped_bit_is_seen():
    data = random.Random(0).randbytes(150)
    seen = {checksum(data)}
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(checksum(bytes(changed)))
    assert len(seen) == 1 + 8 * len(data)


def test_signs_zeros_order_and_length_count():
    row = torch.randn(64, dtype=torch.float64)
    variants = [row, -row, row.flip(0), row[:-8], torch.cat([row, torch.zeros(8, dtype=torch.float64)]), row.roll(8)]
    assert len({checksum(v.numpy().tobytes()) for v in variants}) == len(variants)


@pytest.mark.parametrize("bit", [0, 31, 32, 62, 63])
def test_changes_of_several_words_do_not_cancel_each_other(bit):
    words = torch.from_numpy(np.random.default_rng(bit).integers(-(1 << 63), (1 << 63) - 1, 24))
    flip = torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    seen = {checksum(words.numpy().tobytes())}
    for first, second in combinations(range(24), 2):
        changed = words.clone()
        changed[[first, second]] ^= flip
        seen.add(checksum(changed.numpy().tobytes()))
    assert len(seen) == 1 + 24 * 23 // 2
