"""A reader's image stays as it is while it is held; a writer gets another, and no more copies are kept than needed."""

import torch

from evenstep.server.store.images import Images, View
from evenstep.server.wire.tensors import Spec

SPECS = {"weight": Spec.of(torch.zeros(3, 2)), "bias": Spec.of(torch.zeros(2, dtype=torch.float64))}


def filled(images, value):
    """Write a value everywhere, as an update does."""
    image = images.writable()
    for tensor in image.tensors.values():
        tensor.fill_(value)
    return image


def values(image):
    return {float(x) for tensor in image.tensors.values() for x in tensor.unique()}


def test_without_readers_there_is_one_copy():
    images = Images(SPECS)
    first = images.current
    assert filled(images, 1.0) is filled(images, 2.0) is first
    assert images.count == 1
    images.close()


def test_a_reader_sees_what_it_came_for_while_others_write():
    images = Images(SPECS)
    filled(images, 1.0)
    held = images.hold()
    image = images.writable()
    assert image is images.current is not held
    assert values(image) == {1.0}, "a writer begins with the newest values"
    filled(images, 2.0)
    assert values(held) == {1.0}
    assert values(images.hold()) == {2.0}
    images.close()


def test_a_copy_that_nobody_reads_is_used_again_and_more_are_given_up():
    images = Images(SPECS)
    first = images.hold()
    filled(images, 1.0)
    second = images.hold()
    assert not images.has_room()
    filled(images, 2.0)
    assert images.count == 3
    images.release(first)
    assert images.count == 2
    assert first.fd == -1, "its descriptor is closed"
    images.release(second)
    third = images.hold()
    assert images.has_room()
    assert filled(images, 3.0) is second
    assert values(third) == {2.0}
    images.close()


def test_a_view_releases_its_image_once():
    images = Images(SPECS)
    image = images.hold()
    images.hold()
    with View(images.release, image, image.tensors, {}, 4) as view:
        assert view.version == 4
    view.close()
    assert image.readers == 1
    images.close()
