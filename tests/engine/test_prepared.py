"""A prepared optimizer steps on its owned parameters exactly as torch's does, and can take every operation back."""

import copy

import pytest
import torch
from fakes import together
from torch import nn

from evenstep.core.errors import MismatchError, NondeterminismError, UnsupportedError
from evenstep.engine.delivery import Local, SharedAreas
from evenstep.engine.prepared import PreparedOptimizer

KINDS = {
    "plain": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
}


def build(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(3, 2, bias=False))


class Worker:
    """A model and its optimizer, prepared by one worker of several."""

    def __init__(self, holdings, kind="Adam", seed=1):
        self.holdings, self.model = holdings, build(seed)
        self.added = holdings.models.add(self.model)
        self.prepared = holdings.add(KINDS[kind](self.model.parameters()))
        spans = [(k, k + 1) for k in range(holdings.group.num_workers)]
        self.prepared.gradients.plan, self.prepared.gradients.delivery = self.prepared.in_tree(spans)
        holdings.state.operation = 0

    def prepare(self):
        self.holdings.models.agree(self.added)
        news = self.prepared.agree()
        self.holdings.group.barrier("state moved")
        self.holdings.models.bind(self.added)
        self.prepared.adopt(news, took_part=True)
        self.prepared.kept.remember()
        return self

    @property
    def state(self):
        return self.holdings.state


def gradient(i, step, like):
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(100 * step + i))


def expected(kind, steps):
    """What torch makes of the same gradients."""
    model = build()
    optimizer = KINDS[kind](model.parameters())
    for step in range(steps):
        for i, p in enumerate(model.parameters()):
            p.grad = gradient(i, step, p)
        optimizer.step()
    return model, optimizer


def own_part(worker, step):
    """One step of one of several workers, each with the parameters that it owns."""
    prepared, group = worker.prepared, worker.holdings.group
    worker.state.operation += 1
    mine = prepared.update({i: gradient(i, step, prepared.parameters[i]) for i in prepared.gradients.plan.owned})
    news = sorted(each for theirs in group.gather_json(f"news {step}", mine) for each in theirs)
    prepared.settle(news, {i for i, _, _ in mine})
    group.barrier(f"moved {step}")
    prepared.adopt(news, took_part=True)
    prepared.kept.remember()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_owners_that_step_for_each_other_do_what_torch_does(holdings_of, kind, num_workers):
    workers = [Worker(holdings, kind, seed=n + 1) for n, holdings in enumerate(holdings_of(num_workers))]

    def body(worker):
        worker.prepare()
        for step in range(3):
            own_part(worker, step)

    if num_workers > 1:
        with pytest.warns(UserWarning, match="worker 0's are used"):
            together(workers, body)
    else:
        body(workers[0])
    model, optimizer = expected(kind, 3)
    for worker in workers:
        for (name, ours), theirs in zip(worker.model.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
            here, there = worker.prepared.optimizer.state.get(ours, {}), optimizer.state.get(theirs, {})
            assert here.keys() == there.keys()
            for key, value in there.items():
                assert torch.equal(here[key], value) if isinstance(value, torch.Tensor) else here[key] == value, key
    assert len({worker.state.fingerprint() for worker in workers}) == 1


@pytest.mark.parametrize("after", [0, 2])  # the first update makes the optimizer's state
def test_an_update_that_comes_to_nothing_is_taken_back_and_done_again_to_the_same_bits(holdings_of, after):
    (holdings,) = holdings_of()
    worker = Worker(holdings).prepare()
    for step in range(3):
        if step == after:
            before = holdings.state.fingerprint()
            held = copy.deepcopy(worker.prepared.optimizer.state_dict())
            holdings.state.operation += 1
            news = worker.prepared.update({i: torch.ones_like(p) for i, p in enumerate(worker.model.parameters())})
            worker.prepared.settle(news, {i for i, _, _ in news})
            worker.prepared.rollback()
            holdings.state.rollback()
            holdings.state.operation -= 1
            assert holdings.state.fingerprint() == before
            assert worker.prepared.optimizer.state_dict()["state"].keys() == held["state"].keys()
        own_part(worker, step)
    model, _ = expected("Adam", 3)
    assert all(torch.equal(p, q) for p, q in zip(worker.model.parameters(), model.parameters(), strict=True))


def test_who_comes_late_finds_the_state_where_the_others_have_put_it(holdings_of):
    early, late = (Worker(holdings) for holdings in holdings_of(2))
    together([early, late], Worker.prepare)
    early.state.operation = 1
    news = early.prepared.update({i: torch.ones_like(p) for i, p in enumerate(early.model.parameters())})
    early.prepared.settle(news, {i for i, _, _ in news})
    early.prepared.adopt(news, took_part=True)
    late.prepared.adopt(news, took_part=False)
    assert late.state.fingerprint() == early.state.fingerprint()
    for ours, theirs in zip(late.model.parameters(), early.model.parameters(), strict=True):
        here, there = (w.prepared.optimizer.state[p] for w, p in ((late, ours), (early, theirs)))
        assert here["exp_avg"].data_ptr() != 0
        assert all(torch.equal(here[key], there[key]) for key in there)


def test_only_what_has_a_gradient_is_touched(holdings_of):
    (holdings,) = holdings_of()
    worker = Worker(holdings).prepare()
    before = [p.detach().clone() for p in worker.model.parameters()]
    holdings.state.operation = 1
    news = worker.prepared.update({0: torch.ones(4, 5), 1: None})
    assert [i for i, _, _ in news] == [0]
    same = [torch.equal(p, q) for p, q in zip(worker.model.parameters(), before, strict=True)]
    assert same == [False, True, True, True, True]
    assert all(p.grad is None for p in worker.model.parameters())


def test_another_optimizer_on_another_worker_is_named(holdings_of):
    workers = [Worker(holdings, kind) for holdings, kind in zip(holdings_of(2), ("Adam", "momentum"), strict=True)]
    with pytest.raises(MismatchError, match=r"worker 1 prepares the optimizer \['SGD'.* where worker 0 prepares"):
        together(workers, Worker.prepare)


def test_what_user_code_does_to_the_state_between_steps_is_seen(holdings_of):
    (holdings,) = holdings_of()
    worker = Worker(holdings).prepare()
    own_part(worker, 0)
    worker.prepared.kept.check_untouched()
    optimizer = worker.prepared.optimizer
    first = next(iter(optimizer.state.values()))
    for change in (
        lambda: first["exp_avg"].zero_(),
        lambda: first.update(exp_avg=first["exp_avg"].clone()),
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
    ):
        change()
        with pytest.raises(NondeterminismError, match="the state of Adam was changed between steps"):
            worker.prepared.kept.check_untouched()
        worker.prepared.kept.remember()


def test_an_edit_is_shared_and_can_be_taken_back(holdings_of):
    (holdings,) = holdings_of()
    worker = Worker(holdings).prepare()
    own_part(worker, 0)
    optimizer, p = worker.prepared.optimizer, next(worker.model.parameters())
    before = holdings.state.fingerprint()
    holdings.state.operation += 1
    with worker.prepared.edit() as edit:
        optimizer.state[p]["exp_avg"].zero_()
        del optimizer.state[p]["max_exp_avg_sq"]
        optimizer.param_groups[0]["lr"] = 0.5
    changes = worker.prepared.changes(edit)
    assert changes[1] == [[0, ["max_exp_avg_sq"]]]
    assert changes[2][0]["lr"] == 0.5
    worker.prepared.rollback()
    holdings.state.rollback()
    assert holdings.state.fingerprint() == before
    assert "max_exp_avg_sq" in optimizer.state[p]
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_an_edit_that_leaves_the_optimizer_alone_changes_nothing(holdings_of):
    (holdings,) = holdings_of()
    worker = Worker(holdings).prepare()
    with worker.prepared.edit() as edit:
        pass
    assert worker.prepared.changes(edit) == [[], [], None]


def test_state_of_another_shape_is_refused(holdings_of):
    (holdings,) = holdings_of()
    worker = Worker(holdings).prepare()
    own_part(worker, 0)
    with worker.prepared.edit() as edit:
        next(iter(worker.prepared.optimizer.state.values()))["exp_avg"] = torch.zeros(7)
    with pytest.raises(UnsupportedError, match=r"turned 'exp_avg' of 'model.0.weight' in Adam into"):
        worker.prepared.changes(edit)


def test_parameters_may_be_added_and_not_taken_away(holdings_of):
    (holdings,) = holdings_of()
    worker = Worker(holdings)
    optimizer, weight = worker.prepared.optimizer, worker.model[2].weight
    assert optimizer.param_groups[0]["params"].pop() is weight
    prepared = PreparedOptimizer(holdings.group, holdings.state, optimizer, holdings.names, "other")
    assert prepared.added() == []
    optimizer.add_param_group({"params": [weight], "lr": 0.3})
    assert [id(p) for p in prepared.added()] == [id(weight)]
    prepared.extend(prepared.added(), holdings.names)
    assert prepared.names[-1] == "model.2.weight"
    assert prepared.added() == []
    optimizer.param_groups.pop()
    with pytest.raises(UnsupportedError, match="Adam lost a parameter after it was prepared"):
        prepared.added()


def test_what_cannot_be_split_by_parameter_is_refused(holdings_of):
    (holdings,) = holdings_of()
    model = build()
    holdings.models.add(model)
    stranger = nn.Parameter(torch.ones(9))
    with pytest.raises(UnsupportedError, match=r"a parameter of shape \(9,\) that is in no prepared model"):
        holdings.add(torch.optim.SGD([*model.parameters(), stranger], 0.1))
    with pytest.raises(UnsupportedError, match="LBFGS calls the model by itself"):
        holdings.add(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="SparseAdam needs sparse gradients"):
        holdings.add(torch.optim.SparseAdam(list(model.parameters())))

    class Odd(torch.optim.SGD):
        pass

    with pytest.warns(UserWarning, match="Odd is not from torch.optim"):
        holdings.add(Odd(model.parameters(), 0.1))
    assert len(holdings.optimizers) == 1


def test_options_are_plain_values_and_can_be_put_back(holdings_of):
    (holdings,) = holdings_of()
    model = build()
    holdings.models.add(model)
    prepared = holdings.add(torch.optim.Adam(model.parameters(), torch.tensor(0.25), betas=(0.5, 0.75)))
    options = prepared.hyperparameters()
    assert (options[0]["lr"], options[0]["betas"]) == (0.25, (0.5, 0.75))
    assert "params" not in options[0]
    options[0]["betas"] = [0.1, 0.2]  # as JSON brings it back
    prepared.set_hyperparameters(options)
    assert prepared.optimizer.param_groups[0]["betas"] == (0.1, 0.2)
    assert len(prepared.optimizer.param_groups[0]["params"]) == 5


def test_a_checkpoint_s_state_becomes_news(holdings_of):
    (holdings,) = holdings_of()
    worker = Worker(holdings)
    tensors = {"optimizer.model.0.bias.exp_avg": torch.ones(4), "optimizer2.model.0.bias.exp_avg": torch.ones(4)}
    news = worker.prepared.kept.news_of(tensors, {"optimizer.model.2.weight.mu": 0.5})
    assert [(i, list(forms), values) for i, forms, values in news] == [(1, ["exp_avg"], {}), (4, [], {"mu": 0.5})]


def test_gradients_are_delivered_by_who_is_there(holdings_of):
    (alone,) = holdings_of()
    prepared = Worker(alone).prepared
    plan, delivery = prepared.in_tree([(0, 4)])
    assert isinstance(delivery, Local)
    assert plan.owned == [0, 1, 2, 3, 4]
    several = Worker(holdings_of(2)[1]).prepared
    plan, delivery = several.in_tree([(0, 2), (2, 4)])
    assert isinstance(delivery, SharedAreas)
    assert 0 < len(plan.owned) < 5
    plan, _ = several.in_tree([(0, 2), (2, 4)], [[4, 3], [2, 1, 0]])
    assert plan.buckets == ((4, 3), (2, 1, 0))
    plan, _ = prepared.alone((1, 3), 4, add=False)
    assert plan.owned == []


def test_the_user_gets_an_ordinary_optimizer_back(holdings_of):
    (holdings,) = holdings_of()
    worker = Worker(holdings).prepare()
    own_part(worker, 0)
    holdings.release()
    shared = {entry.live.data_ptr() for entry in holdings.state.entries.values()}
    for p in worker.model.parameters():
        assert p.data_ptr() not in shared
        assert not shared & {t.data_ptr() for t in worker.prepared.optimizer.state[p].values()}
    model, _ = expected("Adam", 2)
    for i, p in enumerate(worker.model.parameters()):
        p.grad = gradient(i, 1, p)
    worker.prepared.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(worker.model.parameters(), model.parameters(), strict=True))
