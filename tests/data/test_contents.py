"""What two batches differ in is named by where it is."""

from collections import OrderedDict

import numpy as np
import torch

from evenstep.data.contents import contents_of, shortened


def test_every_leaf_has_a_path_and_equal_batches_are_equal():
    batch = {"image": torch.ones(2, 3), "more": [torch.arange(2), ("a", 1, None)]}
    found = contents_of(batch)
    assert list(found) == [
        "batch['image']",
        "batch['more'][0]",
        "batch['more'][1]",
    ]
    assert found == contents_of(OrderedDict({"image": torch.ones(2, 3), "more": (torch.arange(2), ["a", 1, None])}))


def test_many_plain_values_are_one_line():
    names = contents_of({"name": [f"sample {n}" for n in range(1000)]})
    assert len(names) == 1
    assert len(str(names)) < 100
    assert names != contents_of({"name": [f"sample {n}" for n in range(999)] + ["another"]})


def test_a_difference_is_told_at_its_place_only():
    first, second = (contents_of((torch.zeros(4), torch.full((2,), value))) for value in (1.0, 2.0))
    assert [path for path in first if first[path] != second[path]] == ["batch[1]"]


def test_an_image_is_compared_by_its_pixels():
    class Image:
        def __init__(self, pixels):
            self.__array_interface__ = pixels.__array_interface__
            self._pixels = pixels

    first, second = (contents_of(Image(np.full((2, 2), value, np.uint8))) for value in (1, 2))
    assert first["batch"].startswith("uint8 (2, 2) ")
    assert first != second


def test_very_much_becomes_one_checksum():
    few, many, other = (
        {f"sample 1[{n}]": str(n * times) for n in range(count)} for count, times in ((64, 1), (65, 1), (65, 2))
    )
    assert shortened(few, "sample 1") == few
    assert list(shortened(many, "sample 1")) == ["sample 1"]
    assert shortened(many, "sample 1") != shortened(other, "sample 1")
