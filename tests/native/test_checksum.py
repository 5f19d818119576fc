"""The checksum sees every change, depends on bytes and order alone, and is written down: it may rest in files."""

import random

import torch

from evenstep.native import core


def checksum(data: bytes, offset: int = 0) -> int:
    memory = torch.frombuffer(bytearray(b"x" * offset + data + b"y"), dtype=torch.uint8)
    return core.checksum(memory.data_ptr() + offset, len(data))


def by_the_book(data: bytes) -> int:
    mask = (1 << 64) - 1

    def take(total: int, word: int) -> int:
        total = (total ^ word) * 0x9E3779B97F4A7C15 & mask
        return total ^ total >> 29

    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    whole = len(data) // 64 * 8
    lanes = list(range(1, 9))
    for at, word in enumerate(words[:whole]):
        lanes[at % 8] = take(lanes[at % 8], word)
    total = len(data)
    for word in (*lanes, *words[whole:]):
        total = take(total, word)
    return take(total, total >> 32)


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
