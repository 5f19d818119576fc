"""What two batches differ in is named by where it is."""

from collections import OrderedDict

import torch

from evenstep.data.contents import contents_of


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
