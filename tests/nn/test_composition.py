"""Synchronized batch norm inside everything else that torch offers."""

import copy
import warnings

import pytest
import spans
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.core.errors import UnsupportedError
from evenstep.nn import DataParallel, SyncBatchNorm1d, convert_sync_batchnorm
from workers import run_workers


class Network(nn.Module):
    """Two batch norms, one of them called twice; the middle may be checkpointed."""

    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.reentrant = reentrant
        self.double()

    def forward(self, x):
        h = self.norm(self.first(x))
        for _ in range(2):
            h = self.middle(h) if self.reentrant is None else checkpoint(self.middle, h, use_reentrant=self.reentrant)
        return h


def data(rows=8):
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(rows, 4, generator=generator, dtype=torch.float64),
        torch.randn(rows, 6, generator=generator, dtype=torch.float64),
    )


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def plainly(rows=8):
    """What one process without any of it gives."""
    model, (x, w) = Network(), data(rows)
    (model(x) * w).sum().backward()
    return gradients(model), dict(model.named_buffers())


def assert_all_close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(
                ours[name], theirs[name], rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
            )


def on_replicas(model):
    x, w = data()
    (DataParallel(model, devices=["cpu"] * 3)(x) * w).sum().backward()
    return gradients(model), dict(model.named_buffers())


def on_shards(model, num_workers):
    def body(worker):
        mine, (x, w) = copy.deepcopy(model), data()
        with evenstep.Run(shards=4, quiet=True, timeout_s=20.0) as run:
            names = {id(p): n for n, p in mine.named_parameters()}
            optimizer, seen = torch.optim.SGD(mine.parameters(), lr=0.0), {}
            optimizer.register_step_pre_hook(
                lambda o, *_: seen.update(
                    {names[id(p)]: p.grad * 4 for g in o.param_groups for p in g["params"] if p.grad is not None}
                )
            )
            run.prepare(mine, optimizer, whole=True)
            run.step((x, w), lambda part: (mine(part[0]) * part[1]).sum())
        return seen, dict(mine.named_buffers())

    found = run_workers(num_workers, body, shards=4)
    merged = {name: g for seen, _ in found for name, g in seen.items()}
    return {name: merged[name] for name, _ in model.named_parameters()}, found[0][1]


def on_ranks(model, folder):
    def body(rank):
        x, w = (t.tensor_split(2)[rank] for t in data())
        (model(x) * w).sum().backward()
        return gradients(model), dict(model.named_buffers())

    found = spans.run_ranks(2, body, folder)
    return {name: sum(f[0][name] for f in found) for name in found[0][0]}, found[0][1]


@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("where", ["replicas", "one worker", "two workers", "ranks", "alone"])
def test_a_network_with_and_without_checkpointing(where, reentrant, tmp_path):
    model = convert_sync_batchnorm(Network(reentrant))
    if where == "replicas":
        found = on_replicas(model)
    elif where == "ranks":
        found = on_ranks(model, tmp_path)
    elif where == "alone":
        x, w = data()
        (model(x) * w).sum().backward()
        found = gradients(model), {}
        assert_all_close(found, (plainly()[0], {}))
        return
    else:
        found = on_shards(model, 2 if where == "two workers" else 1)
    assert_all_close(found, plainly())


def test_checkpointing_with_reentrance_works_on_ranks(tmp_path):
    assert_all_close(on_ranks(convert_sync_batchnorm(Network(True)), tmp_path), plainly())


def test_checkpointing_with_reentrance_is_refused_on_replicas_and_shards():
    with pytest.raises(UnsupportedError, match=r"use torch.utils.checkpoint.checkpoint\(..., use_reentrant=False\)"):
        on_replicas(convert_sync_batchnorm(Network(True)))
    with pytest.raises(AssertionError, match=r"use_reentrant=False"):
        on_shards(convert_sync_batchnorm(Network(True)), 1)


def test_a_refused_layer_may_go_on_alone():
    model = convert_sync_batchnorm(Network(True))
    with pytest.raises(UnsupportedError):
        on_replicas(model)
    model.zero_grad()
    x, w = data()
    (model(x) * w).sum().backward()


def test_checkpointing_in_clamp_mode_alone():
    results = []
    for reentrant in (None, False, True):
        model, (x, w) = convert_sync_batchnorm(Network(reentrant), eps_mode="clamp"), data()
        (model(x) * w).sum().backward()
        results.append((gradients(model), dict(model.named_buffers())))
    assert_all_close(results[1], results[0])
    assert_all_close(results[2], results[0])


def test_what_checkpointing_keeps_goes_with_the_graph():
    from evenstep.nn.recomputed import _remembered

    model = convert_sync_batchnorm(Network(False))
    parallel, (x, w) = DataParallel(model, devices=["cpu", "cpu"]), data()
    loss = (parallel(x) * w).sum()
    assert sum(len(calls) for calls in _remembered.values()) > 0
    loss.backward()
    del loss
    assert sum(len(calls) for calls in _remembered.values()) == 0


def test_a_recomputation_that_cannot_be_told_from_another_is_refused():
    """Two calls whose first part is all zeros and whose second part is not the same."""
    layer = SyncBatchNorm1d(2, dtype=torch.float64)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=False)

    parallel = DataParallel(Checkpointed(), devices=["cpu", "cpu"])
    first, second = (torch.zeros(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    losses = []
    for n, x in enumerate((first, second)):
        with torch.no_grad():
            x[2:] = torch.tensor([[1.0, 2.0], [3.0, 5.0]]) * (n + 1)
    # a replica's layer is a copy, so one layer must be called twice in one forward for this
    twice = DataParallel(Twice(Checkpointed()), devices=["cpu", "cpu"])
    losses.append((twice(first, second) * torch.randn(4, 2)).sum())
    with pytest.raises(UnsupportedError, match="same statistics"):
        losses[0].backward()
    (parallel(first) * torch.randn(4, 2)).sum().backward()


class Twice(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, y):
        return self.module(x) + self.module(y)


def test_gradients_accumulate_over_forwards_in_any_order(tmp_path):
    x, w = data(12)
    plain = Network()
    for part, weights in zip(x.split(6), w.split(6), strict=True):
        (plain(part) * weights).sum().backward()

    def accumulate(model, pieces):
        losses = [(model(a) * b).sum() for a, b in pieces]
        for loss in losses:  # the first forward's backward comes first, after the second forward
            loss.backward()

    ours = convert_sync_batchnorm(Network())
    accumulate(DataParallel(ours, devices=["cpu", "cpu"]), list(zip(x.split(6), w.split(6), strict=True)))
    assert_all_close((gradients(ours),), (gradients(plain),))

    def body(rank):
        model = convert_sync_batchnorm(Network())
        rows = [(a.tensor_split(2)[rank], b.tensor_split(2)[rank]) for a, b in zip(x.split(6), w.split(6), strict=True)]
        accumulate(model, rows)
        for a, b in rows:  # and one after the other
            (model(a) * b).sum().backward()
        return gradients(model)

    found = spans.run_ranks(2, body, tmp_path)
    assert_all_close(
        ({n: found[0][n] + found[1][n] for n in found[0]},), ({n: 2 * g for n, g in gradients(plain).items()},)
    )


def test_a_forward_without_gradients_moves_the_running_statistics(tmp_path):
    plain, x = Network(), data()[0]
    with torch.no_grad():
        expected = plain(x)
    ours = convert_sync_batchnorm(Network())
    with torch.no_grad():
        y = DataParallel(ours, devices=["cpu", "cpu"])(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, expected)
    assert_all_close((dict(ours.named_buffers()),), (dict(plain.named_buffers()),))

    def body(rank):
        model = convert_sync_batchnorm(Network())
        with torch.no_grad():
            model(x.tensor_split(2)[rank])
        return dict(model.named_buffers())

    assert_all_close((spans.run_ranks(2, body, tmp_path)[1],), (dict(plain.named_buffers()),))


def test_participants_may_differ_in_grad_mode():
    layer, x = SyncBatchNorm1d(3), torch.randn(4, 3, requires_grad=True)

    class Frozen(nn.Module):
        def __init__(self, which):
            super().__init__()
            self.layer, self.which, self.seen = layer, which, {}

        def forward(self, number, x):
            with torch.set_grad_enabled(int(number) != self.which):
                self.seen[int(number)] = self.layer(x)
            return number

    for which in (0, 1):
        x.grad = None
        model = Frozen(which)
        DataParallel(model, devices=["cpu", "cpu"])(torch.arange(2), x)
        assert not model.seen[which].requires_grad
        weight = torch.randn(2, 3)
        (model.seen[1 - which] * weight).sum().backward()
        leaf = x.detach().clone().requires_grad_()
        rows = slice(0, 2) if which == 1 else slice(2, 4)
        (nn.BatchNorm1d(3)(leaf)[rows] * weight).sum().backward()
        torch.testing.assert_close(x.grad[rows], leaf.grad[rows], rtol=1e-5, atol=1e-5)


def test_eval_mode_never_communicates(tmp_path):
    """Only one rank and one replica run; with a meeting they would wait."""
    layers = [SyncBatchNorm1d(3).eval(), SyncBatchNorm1d(3, track_running_stats=False).eval()]
    layers += [SyncBatchNorm1d(3, track_running_stats=False, eps_mode="clamp").eval()]
    x = torch.randn(6, 3)

    def body(rank):
        return [layer(x) for layer in layers] if rank == 1 else None

    found = spans.run_ranks(2, body, tmp_path)[1]
    for layer, y in zip(layers, found, strict=True):
        torch.testing.assert_close(y, layer(x))
        parts = DataParallel(layer, devices=["cpu", "cpu"])(x)
        torch.testing.assert_close(parts, torch.cat([layer(p) for p in x.split(3)]))
    torch.testing.assert_close(layers[1](x), nn.BatchNorm1d(3, track_running_stats=False).eval()(x))

    def evaluating(worker):
        model = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm1d(3, track_running_stats=False).eval())
        with evenstep.Run(shards=2, quiet=True) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            return float(run.step(x, lambda part: model(part).square().mean()))

    assert run_workers(1, evaluating, shards=2)[0] > 0


def test_autocast_to_bfloat16():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 4))
    ours = convert_sync_batchnorm(copy.deepcopy(plain))
    x, w = torch.randn(8, 3, 6, 6), torch.randn(8, 4)
    outputs = []
    for model in (plain, DataParallel(ours, devices=["cpu", "cpu"])):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        assert y.dtype == torch.bfloat16
        (y.float() * w).sum().backward()
        outputs.append(y.float())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(plain[1].running_var, ours[1].running_var, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain[1].weight.grad, ours[1].weight.grad, rtol=3e-2, atol=0.2)
    assert ours[1].weight.grad.dtype == torch.float32


def test_second_derivatives_are_refused_with_a_remedy():
    layer = SyncBatchNorm1d(3, dtype=torch.float64)
    layer.qualified_name = "critic.norm"
    parallel = DataParallel(layer, devices=["cpu", "cpu"])
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(parallel, (x,))
    with pytest.raises(UnsupportedError, match=r"'critic.norm call 0' was differentiated twice.*eval mode"):
        torch.autograd.gradgradcheck(parallel, (x,))
    for sources in ((x,), (layer.weight,)):
        weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad((parallel(x) * weight).sum(), sources, create_graph=True)
        for wrt in (x, weight):
            with pytest.raises(UnsupportedError, match="differentiated twice"):
                torch.autograd.grad(gradient.square().sum(), wrt, retain_graph=True)


def test_first_derivatives_with_create_graph_are_right():
    x, w = data()
    expected, model = Network(), convert_sync_batchnorm(Network())
    grads = [
        torch.autograd.grad((m(x) * w).sum(), list(m.parameters()), create_graph=True)
        for m in (expected, DataParallel(model, devices=["cpu", "cpu"]))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_backward_twice_is_torchs_error_and_retain_graph_works():
    parallel = DataParallel(convert_sync_batchnorm(Network()), devices=["cpu", "cpu"])
    x, w = data()
    loss = (parallel(x) * w).sum()
    loss.backward(retain_graph=True)
    once = {n: g.clone() for n, g in gradients(parallel).items()}
    loss.backward()
    assert_all_close((gradients(parallel),), ({n: 2 * g for n, g in once.items()},))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_weight_that_is_changed_before_backward_is_torchs_error():
    layer = SyncBatchNorm1d(3)
    y = DataParallel(layer, devices=["cpu", "cpu"])(torch.randn(4, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_inside_the_forward_of_one_participant_is_refused():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = SyncBatchNorm1d(3)

        def forward(self, x):
            y = self.norm(x)
            return torch.autograd.grad(y.sum(), x)[0]

    with pytest.raises(UnsupportedError, match="inside the forward of one participant"):
        DataParallel(Penalty(), devices=["cpu", "cpu"])(torch.randn(4, 3, requires_grad=True))


@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "aot_eager"), (2, "eager")])
def test_a_compiled_model_breaks_its_graph_cleanly(backend, num_ranks, tmp_path):
    def body(rank):  # in processes of its own, because the compiler leaves threads behind
        warnings.simplefilter("ignore")  # the compiler's own
        model = convert_sync_batchnorm(Network())
        x, w = (t.tensor_split(num_ranks)[rank] for t in data())
        compiled = torch.compile(model, backend=backend)
        (compiled(x) * w).sum().backward()
        assert torch._dynamo.utils.counters["graph_break"], "the meeting is not traced"
        found = gradients(model), {n: b.clone() for n, b in model.named_buffers()}
        torch.testing.assert_close(compiled.eval()(x), model.eval()(x))
        return found

    found = spans.run_ranks(num_ranks, body, tmp_path)
    assert_all_close(({n: sum(f[0][n] for f in found) for n in found[0][0]}, found[0][1]), plainly())


@pytest.mark.parametrize("eps_mode", ["plus", "clamp"])
def test_it_is_exported_in_eval_mode(eps_mode):
    model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), eps_mode=eps_mode)
    model(torch.randn(4, 3, 6, 6))
    model.eval()
    x = torch.randn(2, 3, 6, 6)

    def body(worker):
        warnings.simplefilter("ignore")  # the exporter's own
        return torch.export.export(model, (x,)).module()(x)

    torch.testing.assert_close(run_workers(1, body)[0], model(x))


def test_distributed_data_parallel_trains_as_one_process(tmp_path):
    x, w = data(12)
    plain = Network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (plain(x) * w).sum(1).mean().backward()
        optimizer.step()

    def body(rank):
        model = DistributedDataParallel(convert_sync_batchnorm(Network()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        a, b = (t.tensor_split(2)[rank] for t in (x, w))
        for _ in range(3):
            optimizer.zero_grad()
            (model(a) * b).sum(1).mean().backward()
            optimizer.step()
        return dict(model.module.state_dict())

    for state in spans.run_ranks(2, body, tmp_path):
        assert_all_close((state,), (dict(plain.state_dict()),))


@pytest.mark.parametrize("last_user", [2, -1], ids=["on one worker", "on all workers"])
def test_unused_outputs_are_no_hang_and_no_gradient(last_user):
    """Some shards, or all, do not use what the layer gives, so a worker would not come to its backward by itself."""

    def body(worker):
        torch.manual_seed(0)
        model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "last": nn.Linear(3, 1)})
        with evenstep.Run(shards=4, quiet=True, timeout_s=30.0) as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5))

            def step(part):
                y = model["norm"](part)
                return model["last"](y if part[0, 0] < last_user else part).square().mean()

            run.step(torch.arange(24.0).view(8, 3) / 6, step)
        return model["norm"].weight.detach()

    one = run_workers(1, body, shards=4)[0]
    assert torch.equal(one, torch.ones(3)) == (last_user < 0), "without a gradient there is no weight decay either"
    for other in (*run_workers(2, body, shards=4), *run_workers(4, body, shards=4)):
        assert torch.equal(other, one)


def test_unused_outputs_of_a_replica():
    layer = SyncBatchNorm1d(3, dtype=torch.float64)
    leaves = [torch.randn(6, 3, dtype=torch.float64).requires_grad_()]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    weight = torch.randn(3, 3, dtype=torch.float64)
    for model, x in zip((DataParallel(layer, devices=["cpu", "cpu"]), nn.BatchNorm1d(3).double()), leaves, strict=True):
        (model(x)[:3] * weight).sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
