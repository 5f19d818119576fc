"""What no step would train is refused: layers that come after `prepare`, parameters that are in no model."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import evenstep


def batch():
    return torch.ones(8, 4), torch.arange(8) % 3


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))


def replace(model):
    model[2][1] = nn.Linear(6, 3)


def add(model):
    model.append(nn.Linear(3, 3))


def take_away(model):
    del model[1]


def swap(model):
    model[0], model[1] = nn.Identity(), model[1]


def assign(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() * 2)


def load_by_assignment(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


CHANGES = {
    replace: r"layers of 'model.2' are not those of run.prepare: 'model.2.1' is a new Linear",
    add: r"'model.3' is a new Linear.*build the whole model first",
    take_away: r"layers of 'model' are not those of run.prepare",
    swap: r"'model.0' is a new Identity",
    assign: r"parameter 'model.0.weight' was replaced by another after run.prepare.*run\.edit",
    load_by_assignment: r"parameter 'model.0.weight' was replaced",
    lambda model: prune.l1_unstructured(
        model[0], "weight", 0.5
    ): r"'model.0' \(Linear\) has parameters \['bias', 'weight_or",
    lambda model: parametrizations.weight_norm(model[0]): r"'model.0.parametrizations' is a new ModuleDict",
    lambda model: parametrizations.spectral_norm(model[2][1]): r"'model.2.1.parametrizations' is a new ModuleDict",
    lambda model: model.double(): r"parameter 'model.0.weight' has got other memory since run.prepare.*model\.to",
    lambda model: setattr(model[0].bias, "data", torch.zeros(6)): r"parameter 'model.0.bias' has got other memory",
}


@pytest.mark.parametrize(("change", "said"), CHANGES.items(), ids=range(len(CHANGES)))
def test_a_model_that_is_changed_after_prepare_is_refused(change, said):
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))
        change(model)
        with pytest.raises(evenstep.UnsupportedError, match=said):
            run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))


@pytest.mark.parametrize("norm", [False, True])
def test_a_loss_that_depends_on_a_parameter_of_nobodys_is_refused(norm):
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network() if norm else nn.Linear(4, 3)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        head, frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        with pytest.raises(
            evenstep.UnsupportedError, match=r"a parameter of shape \(3.*\) that is in no prepared model"
        ):
            run.step(batch(), lambda part: F.cross_entropy(head(model(part[0])), part[1]))
        run.step(batch(), lambda part: F.cross_entropy(frozen(model(part[0])), part[1]))
        with torch.no_grad():
            teacher = head
        run.step(batch(), lambda part: F.mse_loss(model(part[0]), teacher(torch.ones(3)).detach().expand(4, 3)))

        def penalized(part):
            x = part[0].clone().requires_grad_()  # a leaf, but nothing that anybody would train
            slope = torch.autograd.grad(frozen(x[:, :3]).square().sum(), x, create_graph=True)[0]
            return model(part[0]).mean() + slope.square().mean()

        run.step(batch(), penalized)


def test_a_parameter_that_a_loss_comes_to_depend_on_later_is_found():
    with evenstep.Run(shards=2, quiet=True) as run:
        model, late = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

        def function(part):
            return F.cross_entropy(model(part[0]) + (late if run.version >= 5 else 0), part[1])

        def train():
            for _ in range(5000):
                run.step(batch(), function)

        with pytest.raises(evenstep.UnsupportedError, match=r"shape \(3,\)"):
            train()
        assert run.version >= 5


def test_a_parameter_of_another_prepared_model_is_nobody_strange():
    with evenstep.Run(shards=2, quiet=True) as run:
        model, other = nn.Linear(4, 3), nn.Linear(3, 3)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        other = run.prepare(other)
        run.step(batch(), lambda part: F.cross_entropy(other(model(part[0])), part[1]))


@contextlib.contextmanager
def prepared():
    """A run with a model and an optimizer, after a step."""
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network()
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))
        yield run, model, optimizer


NEXT = {
    "fingerprint": lambda run: run.fingerprint(),
    "save": lambda run: run.save("model.ckpt"),
    "edit": lambda run: run.edit(lambda: None),
    "evaluate": lambda run: run.evaluate([1, 2], 2, lambda part: {"sum": part}),
}


@pytest.mark.parametrize("operation", NEXT)
def test_what_was_changed_after_a_step_is_noticed_by_whatever_comes_next(operation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with prepared() as (run, model, _):
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        with pytest.raises(evenstep.NondeterminismError, match=r"'model.0.weight' was changed between steps"):
            NEXT[operation](run)
        assert not any(tmp_path.iterdir())


def train_and_change():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network()
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with torch.no_grad():
            model[0].weight.mul_(0.5)


def test_what_was_changed_after_the_last_step_is_noticed_by_the_end_of_the_run():
    with pytest.raises(evenstep.NondeterminismError, match=r"'model.0.weight' was changed between steps"):
        train_and_change()


def test_a_loop_that_does_backward_and_step_by_itself_is_refused():
    with prepared() as (_, model, optimizer):
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        with pytest.raises(
            evenstep.UnsupportedError, match=r"SGD.step\(\) was called on gradients of this worker alone"
        ):
            optimizer.step()


def test_a_step_of_the_optimizer_that_was_left_in_the_script_changes_nothing():
    with prepared() as (run, _, optimizer):
        before = run.fingerprint()
        optimizer.step()
        optimizer.zero_grad()
        assert run.fingerprint() == before


def test_an_optimizer_is_prepared_once():
    with prepared() as (run, _, optimizer):
        before = run.fingerprint()
        with pytest.raises(evenstep.ConfigError, match="this SGD is prepared already; prepare every optimizer once"):
            run.prepare(network(), optimizer)
        assert run.fingerprint() == before


def test_after_the_run_the_optimizer_is_an_ordinary_one():
    with prepared() as (run, model, optimizer):
        run.close()
        before = model[0].weight.clone()
        model[0].weight.grad = torch.ones(6, 4)
        optimizer.step()
        assert not torch.equal(model[0].weight, before)


def test_torchs_clipping_beside_a_step_is_warned_of():
    with prepared() as (run, model, _):
        with pytest.warns(UserWarning, match=r"clip_grad_norm_ is called beside run.step.*clip_norm=\.\.\."):
            run.step(batch(), lambda part: F.cross_entropy(model(part[0]), part[1]))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
