"""What parts returned is joined as if the batch had not been cut; what cannot be is an error."""

import pytest
import torch

from evenstep.lightning.effects import join, mean


def test_rows_are_put_together_and_numbers_averaged_by_samples():
    values = [
        {"rows": torch.tensor([1, 2, 3]), "loss": torch.tensor(1.0), "names": ["a", "b", "c"], "rate": 2.0},
        {"rows": torch.tensor([4]), "loss": torch.tensor(5.0), "names": ["d"], "rate": 6.0},
    ]
    found = join(values, [3, 1])
    assert found["rows"].tolist() == [1, 2, 3, 4]
    assert found["loss"] == 2.0
    assert found["names"] == ["a", "b", "c", "d"]
    assert found["rate"] == 3.0


def test_structure_is_kept():
    values = [(torch.zeros(2, 5), [torch.ones(2), None]), (torch.ones(1, 5), [torch.zeros(1), None])]
    rows, (flags, nothing) = join(values, [2, 1])
    assert rows.shape == (3, 5)
    assert flags.tolist() == [1, 1, 0]
    assert nothing is None
    assert join([None, None], [2, 1]) is None


@pytest.mark.parametrize(
    "values",
    [
        [torch.zeros(3), torch.zeros(3)],  # neither a row for each sample nor a number
        [torch.tensor(1), torch.tensor(2)],  # whole numbers have no mean of their type
        [{"a": 1.0}, {"b": 1.0}],
        [1.0, None],
        ["text", "text"],
    ],
)
def test_what_is_unclear_is_refused(values):
    with pytest.raises(ValueError, match="a "):
        join(values, [2, 1])


def test_a_mean_has_the_type_of_its_numbers_and_the_order_of_the_tree():
    values = [torch.tensor(x, dtype=torch.float64) for x in (1e16, 1.0, -1e16, 1.0)]
    assert mean(values, [1, 1, 1, 1]) == ((1e16 + 1.0) + (-1e16 + 1.0)) / 4
    assert mean(values, [1, 1, 1, 1]).dtype == torch.float64
    assert mean([torch.tensor(1), torch.tensor(2)], [1, 3]) == 1.75
