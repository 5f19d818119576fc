"""Layers in parts in the picture: slices, parts with their workers, and what makes them one."""

import networkx
import pytest
import torch
from torch import nn
from tqdm import tqdm

import evenstep
from evenstep.nn import partition
from evenstep.picture import sheet
from evenstep.picture.network import Network
from evenstep.picture.trace import trace
from workers import run_workers

MARKS = {"0": "feature", "2": "input-feature", "3": "feature"}


def model() -> nn.Module:
    chain = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 4))
    return partition(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7, bias=False), chain), MARKS, parts=3)


@pytest.fixture
def network(monkeypatch) -> Network:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # fx has a progress bar, and that a thread
    return trace(model(), 8, 2, [torch.zeros(5, 6)])


def test_every_part_has_a_node_between_what_hands_out_and_what_joins(network):
    assert [(node.label, node.kind, node.shape, node.worker) for node in network.nodes] == [
        ("input_1", "input", (5, 6), None),
        ("copy", "connector", None, None),
        ("0.parts.0", "Linear", (5, 4), 0),
        ("0.parts.1", "Linear", (5, 3), 0),
        ("0.parts.2", "Linear", (5, 3), 1),
        ("concatenate", "connector", (5, 10), None),
        ("1", "ReLU", (5, 10), None),
        ("slice", "connector", None, None),
        ("2.parts.0", "Linear", (5, 7), 0),
        ("2.parts.1", "Linear", (5, 7), 0),
        ("2.parts.2", "Linear", (5, 7), 1),
        ("add up", "connector", (5, 7), None),
        ("copy", "connector", None, None),
        ("3.parts.0", "Linear, GELU, Linear", (5, 4), 0),
        ("3.parts.1", "Linear, GELU, Linear", (5, 4), 0),
        ("3.parts.2", "Linear, GELU, Linear", (5, 4), 1),
        ("add up", "connector", (5, 4), None),
        ("output", "output", (5, 4), None),
    ]
    (join,) = [node for node in network.nodes if node.parameters == ("3.bias",)]
    assert join.label == "add up"
    assert all(node.meets == (node.kind == "connector") for node in network.nodes)


def test_the_flow_passes_through_all_parts(network):
    graph = networkx.node_link_graph(network.to_json(), edges="edges")
    assert networkx.is_directed_acyclic_graph(graph)
    first, last = network.nodes[0].id, network.nodes[-1].id
    assert len(list(networkx.all_simple_paths(graph, first, last))) == 3**3
    assert set(networkx.descendants(graph, first)) == {node.id for node in network.nodes} - {first}
    assert graph.number_of_edges() == 3 * 6 + 5  # three layers of three parts, and what is around them
    names = [p["name"] for _, node in graph.nodes(data=True) for p in node["parameters"]]
    assert sorted(names) == sorted(name for name, _ in model().named_parameters())


def test_the_parts_of_a_worker_are_those_of_a_run(network):
    def body(_worker):
        with evenstep.Run(shards=8, quiet=True) as run:
            net, called = model(), []
            for path, module in net.named_modules():
                if path.startswith("0.parts.") and "." not in path.removeprefix("0.parts."):
                    module.register_forward_hook(lambda *_, path=path: called.append(path))
            run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
            run.step(torch.ones(8, 6), lambda part: net(part).sum())
            return set(called)

    shown = [{n.label for n in network.nodes if n.worker == w and n.label.startswith("0.")} for w in range(2)]
    assert run_workers(2, body) == shown


def test_the_drawing_says_who_computes_a_part(network):
    drawn = sheet.draw(network)
    assert "0.parts.2: Linear(in_features=6, out_features=3, bias=True); computed by worker 1 for all shards" in drawn
    assert "slice the input of Linear in 3 parts by features" in drawn


class Branching(nn.Module):
    """What fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x):
        return self.last(self.first(x)) if len(x) > 1 else self.last(torch.relu(self.first(x)))


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of torch.export about itself
def test_what_is_exported_has_the_same_parts():
    net = partition(Branching(), {"first": "feature", "last": "input-feature"}, parts=2)
    network = trace(net, 8, 2, [torch.zeros(5, 6)])
    assert network.source == "export"
    assert [(node.label, node.shape, node.worker) for node in network.nodes] == [
        ("x", (5, 6), None),
        ("copy", None, None),
        ("first.parts.0", (5, 5), 0),
        ("first.parts.1", (5, 5), 1),
        ("concatenate", (5, 10), None),
        ("slice", None, None),
        ("last.parts.0", (5, 4), 0),
        ("last.parts.1", (5, 4), 1),
        ("add up", (5, 4), None),
        ("output", None, None),
    ]
    assert len(network.edges) == 11
