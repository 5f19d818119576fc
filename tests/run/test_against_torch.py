"""What a run computes is what plain single-process PyTorch computes."""

import copy

import torch
import torch.nn.functional as F
from cases import images
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


def network(*, norm: bool) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 6, 3), *([nn.BatchNorm2d(6)] if norm else []), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)]
    return nn.Sequential(*layers)


def plain_loop(model, optimizer, batches, clip_norm=None):
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_run(model, make_optimizer, batches, shards, **options):
    with evenstep.Run(shards=shards, quiet=True) as run:
        model, _ = run.prepare(model, make_optimizer(model.parameters()))
        return [float(run.step(b, lambda p: F.cross_entropy(model(p[0]), p[1]), **options)) for b in batches]


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def batches_of(*sizes):
    x, y = images(64).tensors
    return [(x[:size], y[:size]) for size in sizes]


def bits(model):
    return [t.numpy().tobytes() for t in model.state_dict().values()]


def test_one_shard_is_the_plain_loop_bit_for_bit():
    ours, theirs = network(norm=False), network(norm=False)
    losses = in_run(ours, momentum, batches_of(16, 9, 1), 1, clip_norm=0.5)
    torch.use_deterministic_algorithms(True)
    try:
        assert losses == plain_loop(theirs, momentum(theirs.parameters()), batches_of(16, 9, 1), clip_norm=0.5)
    finally:
        torch.use_deterministic_algorithms(False)
    assert bits(ours) == bits(theirs)


def test_uneven_and_empty_shards_weigh_every_sample_alike():
    ours, theirs = network(norm=False).double(), network(norm=False).double()
    sizes = [(x.double(), y) for x, y in batches_of(16, 11, 8, 5, 3, 1)]
    losses = in_run(ours, momentum, sizes, 8)
    expected = plain_loop(theirs, momentum(theirs.parameters()), sizes)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_batch_norm_spans_all_shards_also_uneven_and_empty_ones():
    ours, theirs = network(norm=True).double(), network(norm=True).double()
    sizes = [(x.double(), y) for x, y in batches_of(16, 11, 5, 3)]
    losses = in_run(ours, momentum, sizes, 8)
    expected = plain_loop(theirs, momentum(theirs.parameters()), sizes)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_clipping_is_that_of_torch():
    for options in ({"clip_norm": 0.1}, {"clip_norm": 1e9}):
        ours, theirs = network(norm=False).double(), network(norm=False).double()
        sizes = [(x.double(), y) for x, y in batches_of(16, 16)]
        in_run(ours, momentum, sizes, 8, **options)
        plain_loop(theirs, momentum(theirs.parameters()), sizes, **options)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-12)


def test_a_released_model_and_optimizer_train_on_as_ordinary_ones():
    model, twin = network(norm=True), None
    optimizer = torch.optim.Adam(model.parameters())
    with evenstep.Run(shards=4, quiet=True) as run:
        model, optimizer = run.prepare(model, optimizer)
        for batch in batches_of(16, 16):
            run.step(batch, lambda p: F.cross_entropy(model(p[0]), p[1]))
        twin = copy.deepcopy(model)
    other = torch.optim.Adam(twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (twin, other)):
        plain_loop(m, o, batches_of(16, 16))
    assert bits(model) == bits(twin)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_evaluate_counts_every_sample_once_and_averages_over_samples():
    model, dataset = network(norm=True), images(53)
    x, y = dataset.tensors
    with evenstep.Run(shards=8, quiet=True) as run:
        model = run.prepare(model)
        assert isinstance(model, nn.Module)
        counted = []

        def metrics(part):
            counted.append(len(part[0]))
            assert not model.training
            loss = F.cross_entropy(model(part[0]), part[1], reduction="none")
            return {"each": loss, "mean": loss.mean(), "right": model(part[0]).argmax(1) == part[1], "one": 1.0}

        scores = run.evaluate(dataset, 20, metrics)
        outputs = run.predict(dataset, 20, lambda part: {"logits": model(part[0]), "label": part[1]})
        assert model.training
    model.eval()
    with torch.no_grad():
        expected = model(x)
    assert sum(counted) == 53
    loss = F.cross_entropy(expected.double(), y).item()
    assert abs(scores["each"] - loss) < 1e-6
    assert abs(scores["mean"] - loss) < 1e-6
    assert scores["right"] == (expected.argmax(1) == y).double().mean().item()
    assert scores["one"] == 1.0
    torch.testing.assert_close(outputs["logits"], expected)
    assert torch.equal(outputs["label"], y)


def test_steps_do_not_disturb_the_random_numbers_of_the_script():
    def draw():
        return torch.rand(3).tolist()

    with evenstep.Run(shards=4, seed=9, quiet=True) as run:
        expected = [draw(), draw()]
    with evenstep.Run(shards=4, seed=9, quiet=True) as run:
        found = [draw()]
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        before = torch.get_rng_state()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for batch in run.batches(TensorDataset(torch.randn(8, 2, generator=torch.Generator())), 4):
            run.step(batch, lambda p: model(p[0]).sum())
        assert torch.equal(before, torch.get_rng_state())
        assert found[0] == expected[0]


def test_a_script_in_autocast_over_all_steps_trains_on_the_weights_of_now():
    def train(outside):
        torch.manual_seed(2)
        with evenstep.Run(shards=2, quiet=True) as run, torch.autocast("cpu", torch.bfloat16, enabled=outside):
            model = network(norm=False)
            model, _ = run.prepare(model, momentum(model.parameters()))
            for images, labels in batches_of(8, 8, 8):
                with torch.autocast("cpu", torch.bfloat16):
                    run.step((images, labels), lambda part: F.cross_entropy(model(part[0]), part[1]))
            return run.fingerprint()

    assert train(outside=True) == train(outside=False)
