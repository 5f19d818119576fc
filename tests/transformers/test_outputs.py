"""The results of parts, joined, are those of the batch."""

import pytest
import torch

from evenstep.transformers.outputs import joined, mean, weight_of

LABELS = torch.tensor([[3, -100, 4], [-100, -100, 5]])


@pytest.mark.parametrize(
    ("inputs", "shifted", "weight"),
    [
        ({"labels": LABELS}, False, 3),
        ({"labels": LABELS}, True, 2),  # the first label of a row is no target
        ({"shift_labels": LABELS, "labels": LABELS[:, :1]}, True, 3),
        ({"x": torch.zeros(7, 2)}, True, 7),
        ({"x": torch.zeros(7, 2), "labels": None}, False, 7),
    ],
)
def test_a_loss_is_a_mean_over_labels_or_else_over_samples(inputs, shifted, weight):
    assert weight_of(inputs, shifted=shifted) == weight


def test_the_mean_is_weighted_and_a_part_without_weight_counts_for_nothing():
    values = [torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(4.0)]
    assert mean(values, [2, 0, 1]) == torch.tensor(2.0)
    assert mean([torch.tensor(1.0), None], [1, 1]) is None


def test_rows_are_padded_to_the_longest():
    found = joined([torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])])
    assert found.tolist() == [[1, 2, -100], [3, 4, 5]]
