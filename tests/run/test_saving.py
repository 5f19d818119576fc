"""What of a run is kept, and that it goes on only with what it went through before."""

from contextlib import ExitStack

import pytest
import torch
from workshop import Batch, Worker, network, samples

from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.exchange.ledger import Operation
from evenstep.run.others import Nobody
from evenstep.run.saving import Saving


@pytest.fixture
def saving_of(holdings_of):
    """Makes a worker whose model has had two steps, and its saving."""
    stack = ExitStack()

    def make(**changes):
        (holdings,) = holdings_of(**changes)
        model = network()
        worker = stack.enter_context(Worker(holdings, model, torch.optim.Adam(model.parameters(), 0.1)))
        for _ in range(2):
            worker.step(Batch(*samples()), lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1]))

        def perform(kind, attempt, adopt):
            return holdings.ledger.perform(Operation(kind, holdings.version), attempt, adopt)

        return worker, Saving(worker.engine, Nobody(holdings), perform, None)

    with stack:
        yield make


def test_what_is_saved_comes_back_to_the_bit(saving_of, tmp_path):
    worker, saving = saving_of()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(worker.prepared.optimizer, [1])
    saving.track("scheduler", scheduler)
    worker.step(Batch(*samples()), lambda part: worker.model(part[0]).square().mean())
    scheduler.step()
    saving.next = {"epoch": 1, "batch": 2}
    saving.save(tmp_path, writes=True)
    fingerprint = worker.engine.state.fingerprint()
    worker.step(Batch(*samples()), lambda part: worker.model(part[0]).square().mean())
    scheduler.step()
    assert worker.engine.state.fingerprint() != fingerprint
    saving.load(tmp_path)
    assert worker.engine.state.fingerprint() == fingerprint
    assert worker.engine.version == 3
    assert scheduler.last_epoch == 1
    assert worker.prepared.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert saving.position == {"epoch": 1, "batch": 2}


def test_a_fingerprint_that_is_asked_for_waits_for_what_is_on_its_way(saving_of, monkeypatch):
    worker, saving = saving_of()
    told, group, before = [], worker.engine.group, worker.engine.state.fingerprint()

    def collect():
        next(iter(worker.engine.state.entries.values())).live.add_(1.0)  # as when values come from a server

    monkeypatch.setattr(saving._others, "collect", collect)
    monkeypatch.setattr(group, "tell", told.append)
    group.board.ask_fingerprint()
    saving.heed()
    assert worker.engine.state.fingerprint() != before
    assert told == [{"fingerprint now": [2, worker.engine.state.fingerprint()]}]


def test_who_is_not_to_write_does_not(saving_of, tmp_path):
    _, saving = saving_of()
    saving.save(tmp_path / "there", writes=False)
    assert not (tmp_path / "there").exists()


def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(saving_of, tmp_path):
    _, saving = saving_of()
    saving.save(tmp_path, writes=True)
    other, theirs = saving_of(seed=4)
    before = other.engine.state.fingerprint()
    with pytest.raises(CheckpointError, match="seed"):
        theirs.load(tmp_path)
    assert other.engine.state.fingerprint() == before


def test_an_altered_one_too(saving_of, tmp_path):
    worker, saving = saving_of()
    saving.save(tmp_path, writes=True)
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = worker.engine.state.fingerprint()
    with pytest.raises(CheckpointError):
        saving.load(tmp_path)
    assert worker.engine.state.fingerprint() == before


def test_what_is_tracked_can_be_kept(saving_of):
    _, saving = saving_of()
    with pytest.raises(ConfigError, match="track got a int; expected an object with state_dict"):
        saving.track("step", 3)


def test_batches_that_depend_on_the_workers_must_be_those_of_then(saving_of, tmp_path):
    _, saving = saving_of()
    saving.begin_data(100, 8, None)
    saving.save(tmp_path, writes=True)
    _, again = saving_of()
    again.load(tmp_path)
    with pytest.raises(CheckpointError, match="3 workers make global batches of 12 of 100 here"):
        again.begin_data(100, 12, 3)
