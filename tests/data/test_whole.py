"""A whole batch is cut into its samples, or refused: never along another dimension, and nothing is lost."""

import re
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from evenstep.core.errors import ConfigError
from evenstep.data.whole import WholeBatch

Point = namedtuple("Point", "x y")


@dataclass
class Columns:
    x: torch.Tensor
    names: list


def image(n, channels=3):
    return torch.full((channels, 4, 4), float(n))


def images(count, channels=3):
    return [image(n, channels) for n in range(count)]


def targets(count):
    return [{"boxes": torch.full((1 + n, 4), float(n)), "label": n} for n in range(count)]


def test_whatever_has_rows_is_cut_and_keeps_its_type():
    value = {
        "a": torch.arange(6),
        "b": [Point(torch.arange(12).reshape(6, 2), "text"), (torch.arange(6.0),)],
        "c": None,
        "d": Columns(torch.arange(6), list("abcdef")),
        "e": UserDict(f=np.arange(6)),
        "g": (),
    }
    whole = WholeBatch(value)
    part = whole.part(2, 4)
    assert whole.num_rows == 6
    assert part["a"].tolist() == [2, 3]
    assert isinstance(part["b"][0], Point)
    assert part["b"][0].x.tolist() == [[4, 5], [6, 7]]
    assert part["b"][0].y == "text"
    assert part["b"][1][0].tolist() == [2.0, 3.0]
    assert part["c"] is None
    assert (part["d"].x.tolist(), part["d"].names) == ([2, 3], ["c", "d"])
    assert part["e"]["f"].tolist() == [2, 3]
    assert part["g"] == ()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((images(5), torch.arange(5)), [[image(1), image(2)], [1, 2]]),
        ({"text": list("abcde"), "label": (0, 1, 2, 3, 4)}, [["b", "c"], (1, 2)]),
        ((list("abcde"), np.arange(5)), [["b", "c"], [1, 2]]),
        (tuple(zip(*[(image(n), targets(5)[n]) for n in range(5)], strict=True)), [images(5)[1:3], targets(5)[1:3]]),
        ((images(5), images(5, channels=1)), [images(5)[1:3], images(5, channels=1)[1:3]]),
        ([[torch.arange(n) for n in range(5)]], [[torch.arange(1), torch.arange(2)]]),
        ({"ids": [[1], [2, 3], [4], [5], [6]]}, [[[2, 3], [4]]]),
        ([torch.arange(5), torch.tensor(7.0), 3, "all"], [[1, 2], 7.0, 3, "all"]),
    ],
)
def test_lists_as_long_as_there_are_rows_are_samples(batch, expected):
    whole = WholeBatch(batch)
    assert whole.num_rows == 5
    part = whole.part(1, 3)
    assert plain(list(part.values()) if isinstance(part, dict) else list(part)) == plain(expected)


def plain(value):
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_a_bare_list_of_strings_is_cut():
    assert WholeBatch(list("abcde")).part(1, 3) == ["b", "c"]


def test_what_collating_gives_is_several_tensors():
    samples = [((torch.ones(3) * n, torch.ones(3)), n) for n in range(4)]
    (x, _), y = WholeBatch(default_collate(samples)).part(1, 3)
    assert (x[:, 0].tolist(), y.tolist()) == ([1.0, 2.0], [1, 2])
    views = {"views": [torch.arange(8.0).reshape(4, 2), torch.zeros(4, 2)]}
    assert WholeBatch(views).part(3, 4)["views"][0].tolist() == [[6.0, 7.0]]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_as_many_tensors_as_rows_are_still_tensors(rows):
    x, y = WholeBatch([torch.zeros(rows, 7), torch.arange(rows)]).part(rows - 1, rows)
    assert x.shape == (1, 7)
    assert y.tolist() == [rows - 1]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([torch.zeros(5, 2), torch.zeros(4)], r"batch\[0\] has 5 samples but batch\[1\] has 4"),
        ({"x": torch.zeros(5), "names": ["cat", "dog"]}, r"batch\['x'\] has 5 samples but batch\['names'\] has 2"),
        ({"x": torch.zeros(5), "h": [torch.zeros(4)]}, r"batch\['x'\] has 5 samples but batch\['h'\] has 1"),
        ((list("abc"), [1, 2]), r"batch\[0\] has 3 samples but batch\[1\] has 2"),
        (pack_sequence([torch.arange(3), torch.arange(2)]), r"batch\.data has 5 samples but batch\.batch_sizes has 3"),
        (images(8), r"batch is a list of 8 values of one kind: .*torch\.stack"),
        ([(image(n), n) for n in range(8)], r"batch is a list of 8 values of one kind"),
        ({"images": images(8)}, r"batch\['images'\] is a list of 8 values of one kind"),
        ([[1, 2], [3, 4]], r"may hold 2 samples, or 2 columns with 2 samples each"),
        ([("a", 1), ("b", 2)], r"name the columns in a dict"),
        ((torch.zeros(2), [torch.zeros(2), torch.zeros(2)]), r"batch\[1\] is a list of 2 values of one kind"),
        ({"x": torch.zeros(5), "it": Ellipsis}, r"batch\['it'\] is a ellipsis, of which it cannot be told"),
        ({"x": torch.zeros(5), "it": {1, 2}}, r"batch\['it'\] is a set"),
        (torch.zeros(0, 3), "batch is empty; expected at least one sample"),
        ({"x": torch.tensor(1.0), "y": 3}, "no tensor, array or list with samples"),
        ([], "no tensor, array or list with samples"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_with_the_reason(batch, said):
    with pytest.raises(ConfigError, match=said):
        WholeBatch(batch)


def test_samples_of_different_sizes_are_cut_where_something_says_how_many_they_are():
    images = [torch.zeros(3, 4, 4 + n) for n in range(5)]
    with pytest.raises(ConfigError, match=re.escape("(samples, torch.arange(5))")):
        WholeBatch(images)
    found, numbers = WholeBatch((images, torch.arange(5))).part(1, 3)
    assert [image.shape[2] for image in found] == [5, 6]
    assert numbers.tolist() == [1, 2]
