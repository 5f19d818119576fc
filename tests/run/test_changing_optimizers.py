"""What user code changes in an optimizer after it was prepared counts on every number of workers, or is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from workers import cli_run, run_outcomes, run_workers


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(12, 6, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(run, model, numbers):
    for number in numbers:
        run.step(batch(number), lambda part: F.cross_entropy(model(part[0]), part[1]))


def plainly(model, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        inputs, targets = batch(number)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- run.edit ----


def load_earlier(optimizer):
    model = network()
    other = type(optimizer)(
        model.parameters(), **{k: v for k, v in optimizer.defaults.items() if k in ("lr", "momentum")}
    )
    plainly(model, other, range(20, 23))
    state = other.state_dict()
    state["param_groups"][0]["lr"] = 0.05
    return lambda: optimizer.load_state_dict(copy.deepcopy(state))


def halve(optimizer):
    def change():
        for held in optimizer.state.values():
            for value in held.values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    value.mul_(0.5)

    return change


def reset(optimizer):
    return lambda: optimizer.state.clear()


def replace(optimizer):
    def change():
        for held in optimizer.state.values():
            held.update({k: torch.ones_like(v) for k, v in held.items() if isinstance(v, torch.Tensor) and v.ndim})

    return change


@pytest.mark.parametrize("change", [load_earlier, halve, reset, replace])
@pytest.mark.parametrize("make", [adam, momentum])
def test_one_shard_equals_plain_torch_to_the_bit(make, change):
    with evenstep.Run(shards=1, quiet=True) as run:
        model = network()
        model, optimizer = run.prepare(model, make(model.parameters()))
        train(run, model, range(3))
        run.edit(change(optimizer))
        train(run, model, range(3, 6))
        ours, rate = weights(model), optimizer.param_groups[0]["lr"]
    model = network()
    optimizer = make(model.parameters())
    plainly(model, optimizer, range(3))
    change(optimizer)()
    plainly(model, optimizer, range(3, 6))
    assert rate == optimizer.param_groups[0]["lr"]
    assert same(ours, weights(model))


@pytest.mark.parametrize("change", [load_earlier, halve, reset, replace])
def test_every_number_of_workers_ends_on_the_same_bits(change):
    def body(_=None):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = network()
            model, optimizer = run.prepare(model, adam(model.parameters()))
            train(run, model, range(2))
            run.edit(change(optimizer))
            train(run, model, range(2, 5))
            return run.fingerprint()

    assert run_workers(3, body) == [body()] * 3


def test_state_that_is_loaded_before_the_first_step_counts():
    def body(_=None):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = network()
            model, optimizer = run.prepare(model, adam(model.parameters()))
            run.edit(load_earlier(optimizer))
            train(run, model, range(3))
            return run.fingerprint()

    assert run_workers(2, body) == [body()] * 2


EDITED = """
    import torch, evenstep
    from torch import nn

    with evenstep.Run(shards=4) as run:
        model = nn.Linear(5, 2)
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for step in range(8):
            run.step(torch.full((4, 5), step + 1.0), lambda part: model(part).square().mean())
            if step == 2:
                run.edit(lambda: [m.zero_() for held in optimizer.state.values() for m in held.values()])
            if step == 3:
                state = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
                run.edit(lambda: optimizer.load_state_dict(state))
"""


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_a_death_before_or_after_an_edit_changes_nothing(script, tmp_path, step):
    from evenstep.testing import Fault, plant

    path = script(EDITED)
    quiet = cli_run("run", "-n", "1", path)
    faults = plant([Fault("kill", "inside update", step, worker=0)], tmp_path / "faults")
    killed = cli_run("run", "-n", "2", path, variables=faults)
    assert "was killed" in killed.stderr
    assert killed.stdout == quiet.stdout


def test_an_edit_that_fails_leaves_everything_as_it_was():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network()
        model, optimizer = run.prepare(model, adam(model.parameters()))
        train(run, model, range(2))
        before = run.fingerprint()

        def spoil():
            halve(optimizer)()
            optimizer.param_groups[0]["lr"] = 7.0
            raise ArithmeticError

        with pytest.raises(ArithmeticError):
            run.edit(spoil)
        assert run.fingerprint() == before
        assert optimizer.param_groups[0]["lr"] == 1e-2


def test_state_of_another_shape_is_refused():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network()
        model, optimizer = run.prepare(model, momentum(model.parameters()))
        train(run, model, range(1))

        def spoil():
            next(iter(optimizer.state.values()))["momentum_buffer"] = torch.zeros(3)

        with pytest.raises(
            evenstep.UnsupportedError, match=r"'momentum_buffer' of 'model\.0\.weight' in SGD into torch.float32"
        ):
            run.edit(spoil)


@pytest.mark.parametrize("change", [load_earlier, halve, replace])
def test_state_that_is_changed_outside_of_an_edit_is_refused_with_what_works(change):
    def body(_):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = network()
            model, optimizer = run.prepare(model, momentum(model.parameters()))
            train(run, model, range(2))
            change(optimizer)()
            train(run, model, range(2, 3))

    for outcome in run_outcomes(2, body):
        assert outcome.kind in ("NondeterminismError", "PeerError")
        assert "run.edit(lambda: optimizer.load_state_dict(...))" in outcome.text


# ---- add_param_group ----


def thawing(optimizer, model):
    """As in fine-tuning: the last layer first, then the others."""
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})


def test_added_parameters_are_trained_as_in_plain_torch():
    with evenstep.Run(shards=1, quiet=True) as run:
        model = network()
        model, optimizer = run.prepare(model, momentum(model[4].parameters()))
        train(run, model, range(2))
        thawing(optimizer, model)
        train(run, model, range(2, 5))
        ours = weights(model)
    model = network()
    optimizer = momentum(model[4].parameters())
    plainly(model, optimizer, range(2))
    thawing(optimizer, model)
    plainly(model, optimizer, range(2, 5))
    assert same(ours, weights(model))


def test_added_parameters_end_on_the_same_bits_on_every_number_of_workers():
    def body(_=None):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = network()
            model, optimizer = run.prepare(model, momentum(model[4].parameters()))
            train(run, model, range(2))
            thawing(optimizer, model)
            train(run, model, range(2, 4))
            optimizer.add_param_group({"params": model[0].parameters()})
            train(run, model, range(4, 6))
            return run.fingerprint()

    assert run_workers(3, body) == [body()] * 3


def test_a_worker_that_joins_later_trains_them_too(script, tmp_path):
    from evenstep.testing import Fault, plant

    path = script(
        """
        import torch, evenstep
        from torch import nn

        with evenstep.Run(shards=4) as run:
            model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
            model, optimizer = run.prepare(model, torch.optim.AdamW(model[1].parameters(), lr=0.1))
            for step in range(8):
                if step == 3:
                    optimizer.add_param_group({"params": model[0].parameters()})
                run.step(torch.full((4, 5), step + 1.0), lambda part: model(part).square().mean())
        """
    )
    quiet = cli_run("run", "-n", "1", path)
    faults = plant([Fault("kill", "before commit", 3, worker=1), Fault("kill", "forward", 6, worker=0)], tmp_path / "f")
    killed = cli_run("run", "-n", "2", path, variables=faults)
    assert killed.stderr.count("was killed") == 2
    assert killed.stdout == quiet.stdout


def test_parameters_of_no_prepared_model_or_taken_away_are_refused():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = network()
        model, optimizer = run.prepare(model, momentum(model.parameters()))
        train(run, model, range(1))
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
        with pytest.raises(evenstep.UnsupportedError, match=r"shape \(7,\) that is in no prepared model"):
            train(run, model, range(1))
        optimizer.param_groups.clear()
        with pytest.raises(evenstep.UnsupportedError, match="lost a parameter"):
            train(run, model, range(1))
