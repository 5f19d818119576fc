"""Layers cut by features, without a run: outputs, gradients, training, state dicts, and what is refused."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.nn import Partitioned, partition

LAYERS = {
    "linear": (lambda: nn.Linear(7, 10), (4, 7)),
    "linear without bias": (lambda: nn.Linear(7, 10, bias=False), (4, 7)),
    "linear over tokens": (lambda: nn.Linear(7, 10), (4, 5, 7)),
    "conv1d": (lambda: nn.Conv1d(5, 10, 3, padding=1), (4, 5, 8)),
    "conv2d": (lambda: nn.Conv2d(5, 10, (3, 2), stride=2, dilation=(1, 2), bias=False), (4, 5, 9, 8)),
    "conv2d without a batch": (lambda: nn.Conv2d(5, 10, 3), (5, 6, 7)),
    "conv2d around a torus": (lambda: nn.Conv2d(5, 10, 3, padding=1, padding_mode="circular"), (2, 5, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(5, 10, 2), (2, 5, 3, 4, 3)),
    "embedding": (lambda: nn.Embedding(11, 10), 11),
    "embedding with padding": (lambda: nn.Embedding(11, 10, padding_idx=4), 11),
}
BY_FEATURE_ONLY = {
    "conv in groups": (lambda: nn.Conv2d(12, 8, 3, groups=4), (2, 12, 5, 5)),
    "conv of every channel": (lambda: nn.Conv1d(7, 14, 3, groups=7), (2, 7, 5)),
    "chain": (lambda: nn.Sequential(nn.Linear(7, 10), nn.GELU(), nn.Linear(10, 6)), (4, 7)),
    "chain without biases": (
        lambda: nn.Sequential(nn.Linear(7, 10, bias=False), nn.ReLU(inplace=True), nn.Linear(10, 6, bias=False)),
        (4, 7),
    ),
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


def case(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """A layer and an input for it."""
    torch.manual_seed(0)
    build, shape = {**LAYERS, **BY_FEATURE_ONLY}[name]
    layer = build().to(dtype)
    inputs = torch.randint(0, shape, (4, 6)) if isinstance(shape, int) else torch.randn(shape, dtype=dtype)
    return layer, inputs


def gradients(layer: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of a random projection of it: of the input, and of whole parameters by name."""
    inputs = inputs.clone().requires_grad_(inputs.is_floating_point())
    output = layer(inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    layer.zero_grad()
    (output * weights).sum().backward()
    found = {"output": output.detach()} | ({} if inputs.grad is None else {"input": inputs.grad})
    with torch.no_grad():
        kept = copy.deepcopy(layer)
        for to, parameter in zip(kept.parameters(), layer.parameters(), strict=True):
            to.copy_(parameter.grad)
    return found | kept.state_dict()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_layer_in_parts_is_the_layer(name, kind):
    layer, inputs = case(name)
    expected = gradients(layer, inputs)
    for num_parts in (1, 3) if "groups" not in name else (1, 3, 4):
        parted = partition(copy.deepcopy(layer), kind, parts=num_parts)
        assert isinstance(parted, Partitioned)
        assert len(parted.parts) == num_parts
        found = gradients(parted, inputs)
        assert list(found) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12, msg=lambda text, key=key: key + text)


@pytest.mark.parametrize(
    ("layer", "kind", "sizes"),
    [
        (nn.Linear(7, 10), "feature", [(4, 7), (3, 7), (3, 7)]),
        (nn.Linear(10, 7), "input-feature", [(7, 4), (7, 3), (7, 3)]),
        (nn.Embedding(11, 10), "feature", [(11, 4), (11, 3), (11, 3)]),
        (nn.Embedding(11, 10), "input-feature", [(4, 10), (4, 10), (3, 10)]),
        (nn.Conv2d(5, 10, 3), "feature", [(4, 5, 3, 3), (3, 5, 3, 3), (3, 5, 3, 3)]),
        (nn.Conv2d(10, 5, 3), "input-feature", [(5, 4, 3, 3), (5, 3, 3, 3), (5, 3, 3, 3)]),
        (nn.Conv2d(12, 8, 3, groups=4), "feature", [(4, 3, 3, 3), (2, 3, 3, 3), (2, 3, 3, 3)]),
    ],
)
def test_the_first_parts_have_one_feature_more_where_some_remain(layer, kind, sizes):
    parted = partition(layer, kind, parts=3)
    assert [tuple(part.weight.shape) for part in parted.parts] == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_stays(dtype):
    layer, inputs = case("linear", dtype)
    parted = partition(copy.deepcopy(layer), "input-feature", parts=3)
    assert {p.dtype for p in parted.parameters()} == {dtype}
    resolution = torch.finfo(dtype).eps
    torch.testing.assert_close(parted(inputs), layer(inputs), rtol=4 * resolution, atol=4 * resolution)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 10),
        nn.Flatten(),
        nn.Sequential(nn.Linear(60, 13), nn.Tanh(), nn.Linear(13, 9)),
        nn.Linear(9, 10, bias=False),
        nn.ReLU(),
        nn.Linear(10, 4),
    )


MARKS = {"0": "input-feature", "2": "feature", "3": "feature", "5": "input-feature"}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(num_steps):
        inputs = torch.randint(0, 11, (8, 6), generator=generator)
        targets = torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def assert_close(found: nn.Module, expected: nn.Module) -> None:
    assert list(found.state_dict()) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)])
def test_training_ends_where_it_ends_unpartitioned(optimizer):
    whole, parted = network(), partition(network(), MARKS, parts=3)
    assert_close(parted, whole)
    train(whole, optimizer(whole.parameters()))
    train(parted, optimizer(parted.parameters()))
    assert_close(parted, whole)


def test_a_state_dict_is_that_of_the_layers_as_they_were_and_fits_any_number_of_parts():
    parted = partition(network(), MARKS, parts=3)
    train(parted, torch.optim.SGD(parted.parameters(), 0.1))
    saved = parted.state_dict()
    for other in (network(), partition(network(), MARKS, parts=2), partition(network(), {"2": "feature"}, parts=13)):
        assert list(saved) == list(other.state_dict())
        other.load_state_dict(saved)
        assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items())


def test_a_state_dict_that_does_not_fit_is_refused_by_whole_names():
    parted = partition(network(), MARKS, parts=3)
    saved = network().state_dict()
    saved["3.weight"] = saved["3.weight"][:, :5]
    del saved["2.0.bias"], saved["5.bias"]
    with pytest.raises(RuntimeError) as caught:
        parted.load_state_dict(saved)
    assert '"2.0.bias", "5.bias"' in str(caught.value)
    assert "size mismatch for 3.weight: copying a param with shape torch.Size([10, 5])" in str(caught.value)
    assert "parts" not in str(caught.value)


def test_partitioning_draws_no_random_numbers_and_keeps_modes_and_frozen_parameters():
    model = network()
    model.eval()
    model[3].weight.requires_grad_(False)
    before = torch.get_rng_state()
    partition(model, MARKS, parts=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in model.modules())
    assert not any(p.requires_grad for p in model[3].parameters())
    assert all(p.requires_grad for p in model[5].parameters())


def test_a_partitioned_model_can_be_copied_and_pickled():
    parted = partition(network(), MARKS, parts=3)
    for other in (copy.deepcopy(parted), pickle.loads(pickle.dumps(parted))):
        inputs = torch.randint(0, 11, (8, 6))
        assert torch.equal(other(inputs), parted(inputs))
        assert not set(map(id, other.parameters())) & set(map(id, parted.parameters()))


def test_patterns_meet_layers_step_by_step_and_pass_by_what_has_no_parameters():
    model = nn.ModuleDict({"body": network(), "head": nn.Linear(4, 4)})
    partition(model, {"body.*": "feature", "body.2": "batch", "body.5": "input-feature"}, parts=2)
    cut = [name for name, module in model.named_modules() if isinstance(module, Partitioned)]
    assert cut == ["body.0", "body.3", "body.5"]
    assert model["body"][5].cut.gives is None
    assert "Linear in 2 parts, outputs added up" in repr(model["body"][5])


def test_a_layer_that_hangs_in_two_places_is_one_layer_afterwards():
    layer = nn.Linear(4, 4)
    model = partition(nn.ModuleDict({"a": layer, "b": layer}), {"b": "feature"}, parts=2)
    assert model["a"] is model["b"]
    assert isinstance(model["a"], Partitioned)


def test_a_chain_is_refused_if_one_of_its_layers_hangs_elsewhere():
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"chain": nn.Sequential(nn.Linear(4, 4), layer), "other": layer})
    with pytest.raises(UnsupportedError, match=r"'chain\.1' hangs elsewhere too"):
        partition(model, {"chain": "feature"}, parts=2)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))


def test_tied_parameters_stay_tied_where_they_are_cut_alike():
    _, inputs = case("embedding")
    expected = gradients(Tied(), inputs)
    parted = partition(Tied(), {"embed": "input-feature", "out": "feature"}, parts=3)
    assert all(a.weight is b.weight for a, b in zip(parted.embed.parts, parted.out.parts, strict=True))
    found = gradients(parted, inputs)
    torch.testing.assert_close(found, expected)


def test_tied_parameters_that_would_be_cut_otherwise_are_refused_before_anything_changes():
    model = Tied()
    for marks in ({"embed": "feature", "out": "feature"}, {"out": "feature"}):
        with pytest.raises(UnsupportedError, match=r"'embed\.weight', 'out\.weight' are one tensor"):
            partition(model, marks, parts=2)
    assert type(model.out) is nn.Linear


def test_an_index_outside_of_all_rows_is_refused_by_torch():
    parted = partition(nn.Embedding(11, 4), "input-feature", parts=3)
    for index in (11, -1):
        with pytest.raises(IndexError, match="index out of range"):
            parted(torch.tensor([index]))


def with_hook() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "mark", "text"),
    [
        (nn.LSTM(4, 4), "feature", "'LSTM' is a LSTM, expected nn.Linear, nn.Embedding, nn.Conv1d"),
        (nn.ConvTranspose1d(4, 4, 3), "feature", "is a ConvTranspose1d"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)), "feature", "is a Sequential"),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "input-feature", "is a chain, which is cut between"),
        (nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Conv1d(4, 4, 1)), "feature", "has 2 groups; a chain"),
        (nn.Conv1d(4, 4, 3, groups=2), "input-feature", "has 2 groups; cut it by 'feature'"),
        (nn.Embedding(5, 4, max_norm=1.0), "feature", "built with max_norm=1.0"),
        (nn.Embedding(5, 4, sparse=True), "feature", "built with sparse=True"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "feature", "is a ParametrizedLinear"),
        (with_hook(), "feature", "has hooks, which would see parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_cut_is_refused(layer, mark, text):
    with pytest.raises(UnsupportedError) as caught:
        partition(layer, mark, parts=2)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("marks", "options", "text"),
    [
        ({"3": "feature"}, {}, "partition needs parts=P, or mesh="),
        ({"7": "feature"}, {"parts": 2}, "the mark '7' fits no layer of Sequential; look at named_modules()"),
        ({"1.*": "feature"}, {"parts": 2}, "the mark '1.*' fits no layer"),
        (
            {"3": "columns"},
            {"parts": 2},
            "'3' is marked 'columns', expected one of 'batch', 'feature', 'input-feature'",
        ),
        ({"3": "feature"}, {"parts": 11}, "'3' cannot be cut into 11 parts; it has features for 1 to 10"),
        ({"3": "feature"}, {"parts": 0}, "'3' cannot be cut into 0 parts"),
        ({"2": "feature", "2.0": "feature"}, {"parts": 2}, "both '2' and '2.0' inside it are marked"),
    ],
)
def test_marks_that_make_no_sense_are_refused(marks, options, text):
    model = network()
    with pytest.raises(ConfigError) as caught:
        partition(model, marks, **options)
    assert text in str(caught.value)
    assert not any(isinstance(module, Partitioned) for module in model.modules())
