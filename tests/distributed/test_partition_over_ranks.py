"""Layers that the ranks of a mesh share: outputs, gradients, training and state dicts are those of whole layers."""

import logging
import warnings

import pytest
import torch
from ranks import run_rank_outcomes, run_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import evenstep
from evenstep.nn import partition

WHOLE = StateDictOptions(full_state_dict=True)
LAYERS = {
    "linear": (lambda: nn.Linear(10, 10), (4, 5, 10)),
    "linear without bias": (lambda: nn.Linear(10, 10, bias=False), (4, 10)),
    "embedding": (lambda: nn.Embedding(10, 10, padding_idx=3), 10),
    "conv1d": (lambda: nn.Conv1d(10, 10, 3, padding=1), (4, 10, 8)),
    "conv2d without bias": (lambda: nn.Conv2d(10, 10, 3, bias=False), (4, 10, 6, 6)),
    "conv3d without a batch": (lambda: nn.Conv3d(10, 10, 2), (10, 3, 4, 3)),
}
BY_FEATURE_ONLY = {
    "conv in groups": (lambda: nn.Conv2d(12, 24, 3, groups=6), (2, 12, 5, 5)),
    "chain": (lambda: nn.Sequential(nn.Linear(7, 10), nn.GELU(), nn.Linear(10, 6)), (4, 7)),
    "chain of convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(10, 6, 2)),
        (2, 3, 8, 8),
    ),
    "chain after an embedding": (lambda: nn.Sequential(nn.Embedding(11, 10), nn.Tanh(), nn.Linear(10, 6)), 11),
}
CASES = [
    *((name, kind) for name in LAYERS for kind in ("feature", "input-feature")),
    *((name, "feature") for name in BY_FEATURE_ONLY),
]


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = {**LAYERS, **BY_FEATURE_ONLY}[name]
    layer = build().double()
    return layer, torch.randint(0, shape, (4, 6)) if isinstance(shape, int) else torch.randn(shape).double()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(layer: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    inputs = inputs.clone().requires_grad_(inputs.is_floating_point())
    output = layer(inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    (output * weights).sum().backward()
    found = {"output": output.detach()} | ({} if inputs.grad is None else {"input": inputs.grad})
    return found | {name: full(p.grad) for name, p in layer.named_parameters()}


@pytest.mark.parametrize(("backend", "num_ranks"), [("evenstep", 1), ("evenstep", 2), ("evenstep", 3), ("gloo", 3)])
def test_a_layer_of_several_ranks_is_the_layer(backend, num_ranks):
    def body(_rank):
        warnings.simplefilter("ignore")  # torch's, about itself
        mesh = init_device_mesh("cpu", (num_ranks,))
        for name, kind in CASES:
            layer, inputs = make(name)
            expected = gradients(layer, inputs)
            shared = partition(make(name)[0], kind, mesh=mesh)
            assert any(isinstance(p, DTensor) for p in shared.parameters())
            found = gradients(shared, inputs)
            assert list(found) == list(expected)
            for key, value in expected.items():
                torch.testing.assert_close(
                    found[key], value, rtol=1e-12, atol=1e-12, msg=lambda text, at=(name, kind, key): f"{at}: {text}"
                )
        return True

    assert all(run_ranks(num_ranks, body, backend=backend))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.conv = nn.Embedding(11, 10), nn.Conv1d(10, 7, 3, padding=1)
        self.mlp = nn.Sequential(nn.Linear(42, 13), nn.ReLU(), nn.Linear(13, 10, bias=False))
        self.out = nn.Linear(10, 11, bias=False)
        self.whole = nn.Linear(11, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(self.embed(x).mT)).flatten(1)
        return self.whole(self.out(torch.tanh(self.mlp(x))))


MARKS = {"embed": "input-feature", "conv": "feature", "mlp": "feature", "out": "feature"}


def tied() -> nn.Module:
    net = Net()
    net.out.weight = net.embed.weight
    return net


def train(model: nn.Module, num_steps: int = 4) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(2)
    for _ in range(num_steps):
        inputs = torch.randint(0, 11, (8, 6), generator=generator)
        targets = torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("build", [Net, tied])
def test_training_ends_where_it_ends_unpartitioned_and_its_state_fits_any_number_of_ranks(build, tmp_path):
    def body(_rank):
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shared = train(partition(build(), MARKS, mesh=mesh))
        assert (shared.out.weight is shared.embed.weight) == (build is tied)
        state = get_model_state_dict(shared, options=WHOLE)
        if dist.get_rank() == 0:
            torch.save(state, tmp_path / "state")
        return sum(p.to_local().numel() for p in shared.parameters() if isinstance(p, DTensor))

    held = run_ranks(3, body)
    expected = train(build()).state_dict()
    found = torch.load(tmp_path / "state", weights_only=True)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    partitioned = sum(p.numel() for name, p in build().named_parameters() if not name.startswith("whole"))
    assert sum(held) == partitioned, "each rank holds its own parts only"
    build().load_state_dict(found)  # unpartitioned

    def again(_rank):
        warnings.simplefilter("ignore")
        shared = partition(build(), MARKS, mesh=init_device_mesh("cpu", (2,)))
        set_model_state_dict(shared, torch.load(tmp_path / "state", weights_only=True), options=WHOLE)
        state = get_model_state_dict(shared, options=WHOLE)
        return {name: value.numpy().tobytes() for name, value in state.items()} if dist.get_rank() == 0 else None

    assert run_ranks(2, again)[0] == {name: value.numpy().tobytes() for name, value in found.items()}


def test_several_batches_side_by_side_by_fsdp_over_the_other_dimension():
    def batch(number):
        generator = torch.Generator().manual_seed(5 + number)
        return torch.randint(0, 11, (8, 6), generator=generator), torch.randint(0, 4, (8,), generator=generator)

    def train_on(model, inputs, targets):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return model

    def body(_rank):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # it gathers twice, and says so
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "feature"))
        model = partition(Net(), MARKS, mesh=mesh["feature"])
        fully_shard(model, mesh=mesh["data"])
        train_on(model, *batch(mesh["data"].get_local_rank()))
        return {name: value.numpy() for name, value in get_model_state_dict(model, options=WHOLE).items()}

    found = run_ranks(4, body)[0]
    expected = train_on(Net(), *(torch.cat(pair) for pair in zip(batch(0), batch(1), strict=True)))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-5, atol=1e-6)


def test_what_a_mesh_cannot_share_is_refused_by_every_rank():
    def body(_rank):
        errors = []
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "feature"))
        for layer, options in (
            (nn.Linear(4, 4), {"mesh": mesh}),
            (nn.Linear(4, 4), {"mesh": mesh["feature"], "parts": 2}),
            (nn.Linear(4, 1), {"mesh": mesh["feature"]}),
            (nn.Conv1d(3, 3, 1, groups=3), {"mesh": mesh["feature"]}),
            (nn.Conv1d(3, 5, 1), {"mesh": init_device_mesh("cpu", (4,))}),
            (nn.Sequential(nn.Linear(4, 4), nn.ReLU6(), nn.Linear(4, 4)), {"mesh": mesh["feature"]}),
        ):
            try:
                partition(layer, "feature", **options)
            except Exception as error:  # noqa: BLE001  # what is tested
                errors.append(f"{type(error).__name__}: {error}")
        return errors

    outcomes = run_rank_outcomes(4, body)
    assert [outcome.kind for outcome in outcomes] == [None] * 4, outcomes[0].text
    assert [outcome.value for outcome in outcomes] == [
        [
            "ConfigError: the mesh has 2 dimensions; pass one of them, such as mesh['feature']",
            "ConfigError: partition needs parts=P, or mesh= for the ranks of a process group, and not both",
            "ConfigError: 'Linear' cannot be cut into 2 parts; it has features for 1 to 1",
            "UnsupportedError: 'Conv1d' has 3 groups for 2 ranks; a mesh needs a multiple of them",
            "UnsupportedError: 'Conv1d' has 5 channels, of which torch would deal none to the last of 4 ranks; use "
            "fewer ranks, or parts=P in a run",
            "UnsupportedError: 'Sequential.1' is a ReLU6, which torch cannot differentiate for DTensors; mark the two "
            "linear layers instead of their chain",
        ]
    ] * 4


def test_a_run_refuses_what_a_mesh_shares():
    def body(_rank):
        warnings.simplefilter("ignore")
        model = partition(nn.Sequential(nn.Linear(4, 4)), {"0": "feature"}, mesh=init_device_mesh("cpu", (1,)))
        with evenstep.Run(shards=2, quiet=True) as run:
            run.prepare(model)

    (outcome,) = run_rank_outcomes(1, body)
    assert outcome.kind == "UnsupportedError"
    assert "'0.weight' is a DTensor, which the ranks of a mesh share" in outcome.text
