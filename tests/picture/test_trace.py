import warnings

import networkx
import pytest
import torch
from torch import nn
from tqdm import tqdm
from traceable import Branching, Residual, Untraceable

import evenstep
from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.picture.network import Network
from evenstep.picture.trace import trace
from workers import run_workers


def kinds(network: Network) -> dict[str, str]:
    return {node.label: node.kind for node in network.nodes}


def parameters(network: Network) -> dict[str, tuple[str, ...]]:
    return {node.id: node.parameters for node in network.nodes if node.parameters}


def test_fx_shows_modules_functions_and_the_parameters_each_uses():
    network = trace(Residual(), 8, 2)
    assert (network.source, network.note) == ("fx", "")
    assert [(node.label, node.kind) for node in network.nodes] == [
        ("x", "input"),
        ("first", "Linear"),
        ("relu", "function"),
        ("first", "Linear"),
        ("mul", "function"),
        ("norm", "BatchNorm1d"),
        ("add", "function"),
        ("last", "Linear"),
        ("output", "output"),
    ]
    assert parameters(network)["mul"] == ("scale",)
    assert parameters(network)["first_1"] == ("first.weight", "first.bias")
    assert [node.label for node in network.nodes if node.meets] == ["norm"]
    assert ("x", "add") in network.edges
    assert {node.shape for node in network.nodes} == {None}


def test_with_an_example_every_shape_is_known_and_the_model_is_as_it_was(monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # fx has a progress bar, and that a thread
    model = Residual()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    network = trace(model, 8, 2, [torch.randn(6, 4)])
    assert {node.label: node.shape for node in network.nodes}["last"] == (6, 2)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of torch.export about itself
def test_what_fx_cannot_follow_is_exported_call_by_call():
    network = trace(Branching(), 4, 1, [torch.zeros(2, 4)])
    assert network.source == "export"
    assert network.note.startswith("fx could not trace it (RuntimeError: 'len' is not supported")
    labels = [node.label for node in network.nodes]
    assert labels.count("a") == 2
    assert labels[0] == "x"
    assert {"b.0", "b.1"} <= set(labels)
    assert parameters(network)[next(node.id for node in network.nodes if node.label.startswith("add"))] == ("shift",)
    assert networkx.is_directed_acyclic_graph(networkx.DiGraph(network.edges))


def test_what_nobody_can_follow_is_a_tree_of_modules_and_says_so():
    network = trace(nn.Sequential(Untraceable(), nn.ReLU()), 4, 1)
    assert network.source == "modules"
    assert network.note.endswith(
        "the tree of modules, not the flow of data; with --input, torch.export is tried as well"
    )
    assert kinds(network) == {
        "Sequential": "Sequential",
        "0": "Untraceable",
        "0.a": "Linear",
        "0.b": "BatchNorm1d",
        "1": "ReLU",
    }
    assert set(network.edges) == {("(model)", "0"), ("0", "0.a"), ("0", "0.b"), ("(model)", "1")}


@pytest.mark.parametrize(
    "model", [Residual(), Branching(), Untraceable(), nn.LSTM(3, 5, 2)], ids=lambda m: type(m).__name__
)
def test_networkx_loads_the_json(model):
    found = trace(model, 8, 3).to_json()
    graph = networkx.node_link_graph(found, edges="edges")
    assert graph.is_directed()
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (len(found["nodes"]), len(found["edges"]))
    assert [worker["shards"] for worker in graph.graph["workers"]] == [[0, 3], [3, 6], [6, 8]]
    owners = {p["name"]: p["owner"] for _, node in graph.nodes(data=True) for p in node["parameters"]}
    assert owners.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert (owners[name] is None) == (not parameter.requires_grad)


def test_the_owners_are_those_of_a_run():
    def body(_worker):
        torch.manual_seed(0)
        model = Residual()
        with evenstep.Run(shards=8, quiet=True) as run:
            trained = [p for p in model.parameters() if p.requires_grad]
            run.prepare(model, torch.optim.SGD(trained, 0.1))
            return list(run._engine.optimizers[0].gradients.plan.owners), run._engine.sharing.spans

    owners, spans = run_workers(3, body)[0]
    shared = trace(Residual(), 8, 3).partition
    assert [p.owner for p in shared.parameters if p.owner is not None] == owners
    assert list(shared.spans) == spans


def test_a_lazy_model_is_refused_until_it_has_shapes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.LazyLinear(3)
    with pytest.raises(UnsupportedError) as caught:
        trace(model, 4, 1)
    assert str(caught.value) == "weight has no shape yet; call the lazy model once before it is drawn"


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError) as caught:
        trace(Residual(), 8, 2, [torch.zeros(3, 7)])
    assert str(caught.value).startswith(
        "the model fails on inputs of (3, 7) torch.float32: RuntimeError: mat1 and mat2"
    )


def test_more_workers_than_shards_are_refused():
    with pytest.raises(ConfigError) as caught:
        trace(nn.Linear(2, 2), 4, 5)
    assert str(caught.value) == "5 workers and 4 shards: every worker needs one; use from 1 to 4 workers"
