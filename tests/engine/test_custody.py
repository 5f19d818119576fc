"""State that changes by itself is found: on one site the run stops, among several the one that differs is mended."""

from contextlib import ExitStack
from socket import gethostname

import pytest
import torch
from recorders import FakeRecorder
from workshop import Batch, Worker, network, samples

import evenstep
from evenstep.core import points
from evenstep.core.errors import WrongError
from evenstep.engine import holdings as holdings_module
from evenstep.engine import step as step_module
from evenstep.engine.editing import edit
from evenstep.engine.image import Image
from evenstep.testing.faults import flip
from evenstep.transport.memory import DeviceMemory
from workers import WorkersFailed, run_workers


def loss_of(model):
    return lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1])


@pytest.fixture
def worker_of(holdings_of):
    """A worker with batch norm and Adam, so that there is state of every kind, whose steps are all rechecked."""
    with ExitStack() as stack:

        def make(**changes):
            model = network(norm=True)
            (holdings,) = holdings_of(recheck=1, **changes)
            worker = stack.enter_context(Worker(holdings, model, torch.optim.Adam(model.parameters(), 0.1)))
            for step in range(2):
                worker.step(Batch(*samples(seed=step)), loss_of(model))
            return worker

        yield make


def names_of_state():
    buffers = ["running_mean", "running_var", "num_batches_tracked"]
    return ["model.0.weight", *(f"model.1.{name}" for name in buffers), "optimizer.model.2.bias.exp_avg_sq"]


@pytest.mark.parametrize("name", names_of_state())
def test_a_bit_that_has_changed_since_the_last_step_is_found_and_named(worker_of, name):
    worker = worker_of()
    flip(worker.engine.state.entries[name].live, 3)
    with pytest.raises(WrongError, match=f"at step 2 '{name}' is not what the step before left.*worker 0 .machine"):
        worker.step(Batch(*samples()), loss_of(worker.model))
    assert worker.engine.version == 2


@pytest.mark.parametrize("visit", [1, 5, 8])
def test_and_so_is_one_that_changes_while_the_step_is_computed(worker_of, visit):
    worker, visits = worker_of(), []

    def strike(point):
        visits.append(point)
        if visits.count("forward") == visit and point == "forward":
            flip(worker.engine.state.entries["model.0.weight"].live, 50)

    points.arm(strike)
    try:
        with pytest.raises(WrongError, match=r"at step 2 'model\.0\.weight' is not what the step before left"):
            worker.step(Batch(*samples()), loss_of(worker.model))
    finally:
        points.arm(None)


def test_what_is_changed_as_it_should_be_is_no_fault(worker_of):
    worker = worker_of()
    edit(worker.engine.holdings, worker.engine.updates, lambda: worker.model[0].weight.zero_(), 1)
    worker.step(Batch(*samples()), loss_of(worker.model))
    assert worker.engine.version == 3


# ---- a copy of this moment ----


@pytest.fixture
def copied_of(holdings_of, monkeypatch):
    """A worker whose memory is its own, with an image of its state after every step, or a checkpoint."""
    monkeypatch.setattr(holdings_module, "_memory_of", lambda device, segment: DeviceMemory(torch.device("cpu")))
    monkeypatch.setattr(step_module, "CudaRecorder", FakeRecorder)
    with ExitStack() as stack:

        def make(spoil=lambda worker: None, *, image=True, saved=None):
            (holdings,) = holdings_of(recheck=1)
            if image:
                holdings.state.image = Image(holdings.group, torch.device("cpu"), 1)
            model = network(norm=True)
            worker = stack.enter_context(Worker(holdings, model, torch.optim.Adam(model.parameters(), 0.1)))
            holdings.state.saved = saved and (lambda version: saved(worker, version))
            for step in range(4):
                if step == 3:
                    spoil(worker)
                worker.step(Batch(*samples(seed=step)), loss_of(model))
            return worker.engine.state.fingerprint()

        yield make


def spoils(name, bit=3):
    return lambda worker: flip(worker.engine.state.entries[name].live, bit)


@pytest.mark.parametrize("name", names_of_state())
def test_the_only_site_takes_back_what_has_changed_from_its_image(copied_of, capfd, name):
    expected = copied_of()
    assert copied_of(spoils(name)) == expected
    said = capfd.readouterr().err
    assert f"at step 3 worker 0 (machine {gethostname()}," in said
    assert f"holds a wrong '{name}': element [0" in said or f"holds a wrong '{name}': element []" in said
    assert said.endswith("; it is taken back from the image on the host\n")


@pytest.mark.parametrize("shard", [1, 4, 5, 8])
def test_what_was_computed_meanwhile_is_computed_again(copied_of, capfd, shard):
    """Of either pass; both would agree on what is wrong if it changes before the first."""
    expected = copied_of()

    def arm(worker):
        visits = iter(range(1, 10_000))

        def strike(point):
            if point == "forward" and next(visits) == shard:
                spoils("model.2.weight", 62)(worker)

        points.arm(strike)

    try:
        assert copied_of(arm) == expected
    finally:
        points.arm(None)
    assert "at step 3 worker 0 (machine" in capfd.readouterr().err


def test_a_memory_that_goes_on_changing_stops_the_run(copied_of):
    def arm(worker):
        bits = iter(range(10_000))
        points.arm(lambda point: spoils("model.2.weight", next(bits))(worker) if point == "forward" else None)

    try:
        with pytest.raises(WrongError, match="in step 3 the state has changed by itself 3 times while it was computed"):
            copied_of(arm)
    finally:
        points.arm(None)


def test_an_image_that_has_changed_too_is_not_used(copied_of):
    def both(worker):
        spoils("model.0.weight")(worker)
        image = worker.holdings.state.image
        flip(image.find(worker.engine.state.entries["model.0.weight"].live, worker.holdings.ledger.done), 77)

    with pytest.raises(WrongError, match=r"at step 3 'model\.0\.weight' is not what the step before left"):
        copied_of(both)


def test_without_an_image_a_checkpoint_of_this_step_does_it(copied_of, capfd):
    copies = {}

    def spoil(worker):
        copies[3] = {name: tensor.clone() for name, tensor in worker.engine.state.tensors().items()}
        spoils("model.2.bias")(worker)

    def read(worker, version):
        return copies.get(version, {})

    expected = copied_of(image=False)
    assert copied_of(spoil, image=False, saved=read) == expected
    assert "it is taken back from the checkpoint of this step" in capfd.readouterr().err


def test_a_checkpoint_of_something_else_does_not(copied_of):
    def read(worker, version):
        return {name: tensor.clone() for name, tensor in worker.engine.state.tensors().items()}

    with pytest.raises(WrongError, match="is not what the step before left, and nobody else has it"):
        copied_of(spoils("model.2.bias"), image=False, saved=read)


# ---- several sites: each with the whole state ----


def several(num_workers, spoil, steps=4):
    """Train on sites of one worker each; `spoil(site, version, engine)` is called before every step."""

    def body(worker):
        with evenstep.Run(shards=4, seed=1, quiet=True, timeout_s=60.0, recheck=1) as run:
            model, _ = run.prepare(model := network(norm=True), torch.optim.Adam(model.parameters(), 0.1))
            for step in range(steps):
                spoil(worker, step, run._engine)
                run.step(samples(8, seed=step), lambda part: loss_of(model)(part))
            return run.fingerprint()

    return run_workers(num_workers, body)


@pytest.fixture
def sites(monkeypatch):
    """Every worker has a memory of its own, as if it were a GPU."""
    monkeypatch.setattr(holdings_module, "_memory_of", lambda device, segment: DeviceMemory(torch.device("cpu")))
    monkeypatch.setattr(step_module, "CudaRecorder", FakeRecorder)


@pytest.mark.parametrize(("num_workers", "culprit"), [(2, 1), (3, 0), (3, 2)])
def test_a_site_that_differs_takes_the_state_anew(sites, capfd, num_workers, culprit):
    expected = several(num_workers, lambda *_: None)
    assert len(set(expected)) == 1
    assert capfd.readouterr().err == ""

    def spoil(worker, version, engine):
        if (worker, version) == (culprit, 2):
            flip(engine.state.entries["optimizer.model.0.weight.exp_avg"].live, 77)
            flip(engine.state.entries["model.2.bias"].live, 3)

    assert several(num_workers, spoil) == expected
    said = capfd.readouterr().err
    assert f"at step 2 worker {culprit} (machine" in said
    assert "holds a wrong 'model.2.bias' and 1 more: element [0] is " in said
    assert "it gets a new copy of the state" in said


def test_one_that_has_updated_wrong_is_outvoted_by_two(sites, capfd):
    expected = several(3, lambda *_: None)

    def spoil(worker, version, engine):
        if (worker, version) == (1, 2):
            flip(engine.state.entries["model.0.bias"].live, 3)
            engine.recheck._custody._noted = -1, {}

    assert several(3, spoil) == expected
    assert "worker 1 (machine" in capfd.readouterr().err


def test_of_two_that_have_updated_differently_nobody_can_say(sites):
    def spoil(worker, version, engine):
        if (worker, version) == (1, 2):
            flip(engine.state.entries["model.0.bias"].live, 3)
            engine.recheck._custody._noted = -1, {}

    with pytest.raises(WorkersFailed, match="the sites hold different states and there is no majority"):
        several(2, spoil)


def test_a_site_that_computes_a_gradient_wrong_is_named_as_any_worker_is(sites):
    def spoil(worker, version, engine):
        del engine
        if (worker, version) == (1, 2):
            strikes = iter(range(10_000))
            points.arm(None, lambda what, tensor: flip(tensor, 9) if what == "gradient" and not next(strikes) else None)

    with pytest.raises(WorkersFailed, match=r"worker 1 \(machine .* computed wrong in step 2, shard \d, gradient of"):
        several(3, spoil)
