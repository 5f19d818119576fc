"""The copy past the caches is a copy, wherever it begins and ends."""

import torch

from evenstep.native import core


def test_every_byte_arrives_and_no_other_is_touched():
    source = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    for begin in (0, 1, 15, 16, 63, 64, 65):
        for num_bytes in (0, 1, 63, 64, 65, 127, 128, 1000, 4096):
            for offset in (0, 1, 63):
                target = torch.zeros(5000, dtype=torch.uint8)
                core.copy(target.data_ptr() + begin, source.data_ptr() + offset, num_bytes)
                expected = torch.zeros(5000, dtype=torch.uint8)
                expected[begin : begin + num_bytes] = source[offset : offset + num_bytes]
                assert torch.equal(target, expected)
