"""A picture shows the flow of data, and nothing that a trace holds beside it."""

import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm

from evenstep.picture.network import Network
from evenstep.picture.trace import trace


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # fx has a progress bar, and that a thread


def traced(model: nn.Module, *examples: Tensor) -> Network:
    network = trace(model, 4, 1, examples)
    assert {end for edge in network.edges for end in edge} <= {node.id for node in network.nodes}
    return network


def labels(model: nn.Module, *examples: Tensor) -> list[str]:
    network = traced(model, *examples)
    assert network.source == "fx"
    return [node.label for node in network.nodes]


class Sizes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.place = nn.Linear(4, 4), nn.Parameter(torch.zeros(9, 4))

    def forward(self, x):
        x = self.inner(x + self.place[: x.shape[1]])
        return x.view(x.size(0), x.shape[1], 2, x.shape[2] // 2) + torch.full((x.ndim,), 1.0, dtype=x.dtype).sum()


@pytest.mark.parametrize("examples", [(), (torch.zeros(2, 3, 4),)], ids=["no example", "example"])
def test_sizes_are_no_data(examples):
    assert labels(Sizes(), *examples) == ["x", "getitem", "add", "inner", "view", "full", "sum", "add", "output"]


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, mask=None, *, twice=False):
        x = self.inner(x) if mask is None else self.inner(x) * mask
        return x + x if twice else x


def test_an_argument_that_nobody_gives_has_its_default():
    assert labels(Optional()) == ["x", "inner", "output"]
    assert labels(Optional(), torch.zeros(2, 4)) == ["x", "inner", "output"]
    assert labels(Optional(), torch.zeros(2, 4), torch.ones(4)) == ["x", "mask", "inner", "mul", "output"]


class Leftovers(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.side = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x, unused):
        y, (_h, _c) = self.lstm(x)
        self.side(y)
        y.mul_(2)
        return y


def test_results_that_nobody_takes_are_left_out_but_not_what_may_have_an_effect():
    assert labels(Leftovers()) == ["x", "unused", "lstm", "getitem", "side", "mul_", "output"]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.bag(x)) * len(x)


def test_the_shape_of_a_module_is_that_of_its_result_and_operators_have_plain_names():
    network = traced(Bag(), torch.zeros(2, 6, dtype=torch.int64))
    assert network.source == "export"
    assert {node.label: node.shape for node in network.nodes} == {
        "x": (2, 6),
        "bag": (2, 8),
        "out": (2, 3),
        "mul": (2, 3),
        "output": None,
    }


def test_an_attention_of_torch_is_one_node():
    network = traced(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.zeros(2, 3, 8))
    assert network.source == "export"
    (node,) = (node for node in network.nodes if node.label == "self_attn")
    assert (node.kind, node.shape, len(node.parameters)) == ("MultiheadAttention", (2, 3, 8), 4)


class ByValue(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_what_tracers_print_is_kept_from_the_user(capfd):
    assert trace(ByValue(), 4, 1, [torch.ones(2)]).source == "modules"
    assert capfd.readouterr() == ("", "")
