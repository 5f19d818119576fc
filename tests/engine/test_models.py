"""Models are one for all workers: parameters once, buffers as the first shard left them."""

import pytest
import torch
from fakes import together
from torch import nn

from evenstep.core.errors import MismatchError, NondeterminismError, UnsupportedError
from evenstep.engine.models import check_model
from evenstep.plan.sites import Sites


def build(seed=1, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))


def prepare(models, model):
    added = models.add(model)
    models.agree(added)
    models._group.barrier("moved")
    models.bind(added)
    models.remember()
    return model


def prepared(holdings_of, num_workers=1):
    """The models of each worker, and the one that it has prepared."""
    workers = holdings_of(num_workers)
    built = [build() for _ in workers]
    together(list(zip(workers, built, strict=True)), lambda worker: prepare(worker[0].models, worker[1]))
    return list(zip([worker.models for worker in workers], built, strict=True))


def test_the_first_worker_s_values_are_everyone_s_and_lie_once(holdings_of):
    workers, seeds = holdings_of(2), [1, 2]
    built = [build(seed) for seed in seeds]
    with pytest.warns(UserWarning, match="the workers built different initial weights; worker 0's are used"):
        together(list(zip(workers, built, strict=True)), lambda worker: prepare(worker[0].models, worker[1]))
    for name, value in build(1).state_dict().items():
        assert all(torch.equal(model.state_dict()[name], value) for model in built)
    with torch.no_grad():
        built[0][0].weight.fill_(7)
        built[0][1].running_mean.fill_(7)
    assert (built[1][0].weight == 7).all(), "a parameter is one for all"
    assert (built[1][1].running_mean == 0).all(), "a buffer is a copy"


def test_a_model_of_another_shape_on_another_worker_is_named(holdings_of):
    workers = list(zip(holdings_of(2), [build(), build(width=5)], strict=True))
    with pytest.raises(
        MismatchError, match=r"worker 1 prepares \['model.0.weight', \[5, 3\].* where worker 0 prepares"
    ):
        together(workers, lambda worker: prepare(worker[0].models, worker[1]))


def test_a_model_that_is_prepared_twice_is_taken_once(holdings_of):
    ((models, model),) = prepared(holdings_of)
    entries = list(models.state.entries)
    prepare(models, model)
    assert list(models.state.entries) == entries
    prepare(models, nn.Linear(2, 2))
    assert "model2.weight" in models.state.entries


def test_buffers_are_committed_as_the_first_shard_left_them(holdings_of):
    (first, _), (second, theirs) = prepared(holdings_of, 2)
    after = {name: torch.ones_like(b) * 5 for name, b in first.slots.buffers.items()}
    first.keep_buffers(after)
    after["model.1.running_mean"].zero_()
    assert first.kept_buffers["model.1.running_mean"].tolist() == [5] * 4, "a copy"
    before = first.state.fingerprint()
    first.state.operation = 4
    first.publish_buffers("", 0, [], idle=False)
    second.publish_buffers("", 0, [], idle=False)
    assert (theirs[1].running_mean == 0).all()
    second.pull()
    assert (theirs[1].running_mean == 5).all()
    assert first.kept_buffers == {}
    first.state.rollback()
    assert first.state.fingerprint() == before, "and can be had back"


class Elsewhere:
    """Another site, whose values come."""

    def spread(self, tag, tensors, source, sites, only=None):
        for tensor in tensors:
            tensor.fill_(9)


def test_buffers_that_another_site_gives_can_be_had_back_too(holdings_of):
    ((models, _),) = prepared(holdings_of)
    models.state.sites, models.state.spreading = Sites.of(0, "ab"), Elsewhere()
    models.keep_buffers({name: torch.ones_like(b) * 5 for name, b in models.slots.buffers.items()})
    before, models.state.operation = models.state.fingerprint(), 4
    changed = models.changed_buffers()
    assert len(changed) == 3, "this batch norm is the plain one, which spans nothing"
    others = models.buffers_to_spread(changed, everywhere=True)
    models.publish_buffers("", 1, others, idle=False)
    assert all((entry.live == 9).all() for entry in others)
    models.state.rollback()
    assert models.state.fingerprint() == before


def test_only_buffers_that_a_forward_changed_go_to_other_sites(holdings_of):
    ((models, _),) = prepared(holdings_of)
    models.keep_buffers(dict(models.slots.buffers))
    assert models.changed_buffers() == []
    assert models.buffers_to_spread([], everywhere=True) == []
    assert len(models.buffers_to_spread([], everywhere=False)) == 3


def test_what_was_kept_in_vain_can_be_taken_away(holdings_of):
    ((models, _),) = prepared(holdings_of)
    models.keep_buffers({name: torch.ones_like(b) for name, b in models.slots.buffers.items()})
    assert models.take_buffers().keys() == models.slots.buffers.keys()
    before = models.state.fingerprint()
    models.publish_buffers("", 0, [], idle=False)
    assert models.state.fingerprint() == before


def test_a_forward_outside_of_a_step_leaves_no_trace(holdings_of):
    ((models, model),) = prepared(holdings_of)
    model(torch.randn(4, 3))
    assert not torch.equal(model[1].running_mean, torch.zeros(4))
    models.restore_buffers()
    assert torch.equal(model[1].running_mean, torch.zeros(4))


def test_parameters_that_user_code_changes_between_steps_are_named(holdings_of):
    ((models, model),) = prepared(holdings_of)
    models.check("between steps")
    with torch.no_grad():
        model[0].bias.mul_(2)
    with pytest.raises(NondeterminismError, match=r"'model.0.bias' was changed between steps.*run.edit"):
        models.check("between steps")
    models.remember()
    model[0].weight.data = torch.zeros(4, 3)
    with pytest.raises(UnsupportedError, match=r"'model.0.weight' has got other memory"):
        models.check("between steps")


def test_an_edit_is_drawn_from_its_seed_and_can_be_taken_back(holdings_of):
    ((models, model),) = prepared(holdings_of)
    before, generator = models.state.fingerprint(), torch.get_rng_state()

    def change():
        model[0].weight.normal_()
        model[1].running_var.uniform_()

    found = []
    for _ in range(2):
        models.state.operation = 3
        assert models.edit(change, 17, []) == []
        found.append(models.state.fingerprint())
        models.state.rollback()
        models.pull()
        assert models.state.fingerprint() == before
    assert found[0] == found[1] != before
    assert torch.equal(torch.get_rng_state(), generator)


def test_models_are_given_back_as_ordinary_ones(holdings_of):
    ((models, model),) = prepared(holdings_of)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    shared = {entry.live.data_ptr() for entry in models.state.entries.values()}
    models.release([])
    assert not shared & {p.data_ptr() for p in model.parameters()}
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


REFUSALS = {
    "a dict as model": dict,
    "wrapped in DataParallel": lambda: nn.DataParallel(nn.Linear(1, 1)),
    "layer '0' was built with sparse=True": lambda: nn.Sequential(nn.Embedding(2, 2, sparse=True)),
    "'weight' has no shape yet": lambda: nn.LazyLinear(2),
    "'weight' is on the meta device": lambda: nn.Linear(2, 2, device="meta"),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_model_that_cannot_be_trained_exactly_is_refused_before_anything_is_changed(message):
    model = REFUSALS[message]()
    with pytest.raises(UnsupportedError, match=message):
        check_model(model)


def test_parameters_of_odd_types_are_refused():
    model = nn.Linear(2, 2)
    model.odd = nn.Parameter(torch.zeros(2, 2).to_sparse())
    with pytest.raises(UnsupportedError, match=r"'odd' is a torch.sparse_coo tensor"):
        check_model(model)
    check_model(build())


def test_a_parameter_in_the_memory_of_another_tensor_is_refused():
    def pair():
        return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    tied = pair()
    tied["b"].weight = tied["a"].weight
    check_model(tied)
    two = pair()
    two["b"].weight.data = two["a"].weight.data
    with pytest.raises(UnsupportedError, match=r"'a.weight' and 'b.weight' share memory, but are two tensors"):
        check_model(two)
    view = pair()
    view.register_buffer("first", view["a"].weight.data[1])
    with pytest.raises(UnsupportedError, match=r"'a.weight' and 'first' share memory"):
        check_model(view)
    constants, table = pair(), torch.zeros(4)
    constants.register_buffer("table", table)
    constants.register_buffer("part", table[:2])
    check_model(constants)
    flat = pair()
    memory = torch.zeros(8)
    flat["a"].weight.data, flat["b"].weight.data = memory[:4].view(2, 2), memory[4:].view(2, 2)
    check_model(flat)
