"""Memory that tensors lie in."""

import os

import torch

from evenstep.server.wire.areas import Area, hand_over, map_image, places
from evenstep.server.wire.tensors import Spec, TensorHead, encode, fresh

SPECS = {"w": Spec(torch.float32, (3, 5)), "none": Spec(torch.float32, (0,)), "n": Spec(torch.int64, ())}


def test_two_processes_see_one_image():
    offsets, size = places(SPECS)
    assert all(offset % 64 == 0 for offset in offsets.values())
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, size)
        mine, theirs = map_image(fd, SPECS), map_image(fd, SPECS, writable=False)
        mine["w"].fill_(3)
        mine["n"].fill_(7)
        assert (float(theirs["w"].sum()), int(theirs["n"]), theirs["none"].shape) == (45, 7, (0,))
    finally:
        os.close(fd)


def test_an_area_is_free_when_nobody_holds_its_tensors():
    head = TensorHead.parse(bytes(encode({"w": torch.zeros(4)})[0][8:]), 16)
    area = Area(fresh(16))
    held = area.tensors(head)
    assert area.tensors(head)["w"] is held["w"], "made once"
    assert not area.is_free(lasting=False)
    del held
    assert area.is_free(lasting=False)


def test_what_is_handed_over_arrives():
    for size in (10, 1 << 19):
        source, target = torch.randn(size), torch.empty(size)
        assert hand_over(target, source) is target
        assert torch.equal(target, source)
    assert torch.equal(hand_over(torch.empty(5), torch.arange(10.0)[::2]), torch.arange(10.0)[::2])
