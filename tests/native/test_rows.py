"""Levels of Parquet pages are what lists of one length have, however they were packed, or are refused."""

from itertools import takewhile

import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.native import core


def varint(value):
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


@given(
    st.sampled_from([0, 1, 2, 3, 7, 8, 9, 10, 31, 63, 64, 65, 130]),
    st.integers(1, 3),
    st.integers(1, 1500),
    st.booleans(),
    st.data(),
)
def test_levels_are_checked_one_by_one(length, top, count, alter, data):
    top = 1 if length else top
    bits = top.bit_length()
    expected = [0 if length and n % length == 0 else top for n in range(count)]
    levels = list(expected)
    if alter:
        levels[data.draw(st.integers(0, count - 1))] = data.draw(st.integers(0, top))
    packed, at = b"", 0
    while at < count:
        groups = data.draw(st.sampled_from([0, 0, 1, 7, 8, 9, 63, 64]))
        if groups:  # of eight, the last ones filled up with anything
            some = levels[at : at + 8 * groups]
            word = sum(level << bits * n for n, level in enumerate([*some, *[1] * (8 * groups - len(some))]))
            packed += varint(groups << 1 | 1) + word.to_bytes(groups * bits, "little")
        else:
            some = list(takewhile(levels[at].__eq__, levels[at:]))
            packed += varint(len(some) << 1) + bytes(some[:1])
        at += len(some)

    def found(num_bytes):
        memory = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return core.levels_are(memory.data_ptr(), num_bytes, bits, count, top, length)

    assert found(len(packed)) == (levels == expected)
    assert not found(len(packed) - 1) or levels == expected
