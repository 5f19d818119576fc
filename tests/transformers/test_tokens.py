"""Tokens are counted part by part, and add up to those of the batch."""

import pytest
import torch
from torch import nn

from evenstep.transformers.tokens import TokenCount

TOKENS = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]])


@pytest.mark.parametrize(
    ("inputs", "padding", "expected"),
    [
        ({}, 0, (0, 0)),
        ({"input_ids": TOKENS}, None, (8, 8)),
        ({"input_ids": TOKENS}, 0, (8, 4)),
        ({"input_ids": TOKENS, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])}, 0, (8, 5)),
    ],
)
def test_a_mask_says_what_is_padding_and_else_the_token_that_pads(inputs, padding, expected):
    assert TokenCount.of(inputs, "input_ids", padding) == expected


def test_the_parts_add_up_to_the_batch():
    parts = [list(TokenCount.of({"x": rows}, "x", 0)) for rows in TOKENS.split(1)]  # lists, as JSON brings them back
    assert TokenCount.total(parts) == TokenCount.of({"x": TOKENS}, "x", 0) == (8, 4)


def test_operations_are_counted_for_models_that_know_their_size():
    class Sized(nn.Linear):
        def num_parameters(self, *, exclude_embeddings):
            return 10 if exclude_embeddings else 99

    assert TokenCount(8, 4).operations(Sized(1, 1)) == 6 * 8 * 10
    assert TokenCount(8, 4).operations(nn.Linear(1, 1)) == 0


@pytest.mark.parametrize(("kind", "count"), [("no", 0), ("all", 8), ("non_padding", 4)])
def test_what_is_reported_is_what_was_asked_for(kind, count):
    assert TokenCount(8, 4).wanted(kind) == count
