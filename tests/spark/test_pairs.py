"""Pairs become rows of one kind, or are refused with a sentence."""

import re

import numpy as np
import pytest

from evenstep.core.errors import ConfigError
from evenstep.spark.pairs import as_row, kinds_of


def test_kinds_are_those_of_the_first_pair():
    assert kinds_of(([1, 2], 0)) == ("array<bigint>", "bigint")
    assert kinds_of((np.zeros((2, 3), np.float32), 0.5)) == ("array<array<float>>", "double")
    assert as_row((np.array([3, 4]), 1), ("array<bigint>", "bigint")) == ([3, 4], 1)
    assert as_row((None, 0), ("array<double>", "bigint")) == (None, 0), "the column is named where it is written"


def test_what_spark_would_take_for_null_is_made_a_number():
    ((first, second), label) = as_row((np.array([True, False]), np.bool_(True)), ("array<bigint>", "bigint"))
    assert [type(each) for each in (first, second, label)] == [int] * 3
    assert (first, second, label) == (1, 0, 1)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (
            ([1.5, 2.0], 0),
            "the features of a row are of the kind array<double>, and those of the first row array<bigint>",
        ),
        (([[1, 2]], 0), "the features of a row are of the kind array<array<bigint>>, and those of the first row"),
        (([1, 2], [0]), "the label of a row are of the kind array<bigint>, and those of the first row bigint"),
        (7, "a row is 7; expected a pair"),
        (("a", 0), "a row has 'a'; expected a number or an array"),
    ],
)
def test_pairs_of_another_kind_than_the_first_are_refused(pair, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        as_row(pair, ("array<bigint>", "bigint"))
