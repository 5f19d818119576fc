"""A worker that meets the others only at a server has its own shards, and knows what an earlier life has sent."""

import json
import os

import pytest
import torch
from clients import FakeServer
from torch import nn
from workshop import Batch, network, samples

from evenstep.core import env as environment
from evenstep.core.errors import UnsupportedError
from evenstep.engine.reports import Report
from evenstep.engine.results import Mean, ShardResult
from evenstep.run import apart as module
from evenstep.run.apart import Apart

RESULTS = {2: ShardResult(Mean(1.5, 3.0), False, {"hit": Mean(2.0, 3.0)})}


class Through(FakeServer):
    """A server, and how a run goes through it."""


def environment_of(worker=1, num_workers=2, **more):
    found = environment.read()
    return type(found)(**{**vars(found), "worker": worker, "num_workers": num_workers, **more})


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(module, "_sent_before", {})
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def died_after(count, staleness=None):
    """A server that an earlier life of worker 1 has sent so many updates to."""
    server = Through(staleness=staleness)
    server.done["worker-1.job"] = count, {"version": count, "notes": [Report(1, {}, {}, RESULTS, 0.0).pack()]}
    return server


def test_every_worker_has_its_share_of_the_shards(holdings_of):
    (holdings,) = holdings_of()
    server = Through()
    found = [Apart(holdings, server, environment_of(worker, 3)) for worker in range(3)]
    assert [a.shards for a in found] == [(0, 2), (2, 3), (3, 4)]
    assert [a.client.worker for a in found] == ["worker-0", "worker-1", "worker-2"]
    for each in found:
        each.client.close()


def test_a_batch_counts_as_far_as_its_shards_are_here(holdings_of):
    (holdings,) = holdings_of()
    apart = Apart(holdings, Through(), environment_of())
    batch = Batch(*samples(9), is_last=True)
    own = apart.own(batch)
    assert own.sizes == [0, 0, *batch.sizes[2:]]
    assert (own.name, own.is_last, own.contents()) == (batch.name, True, {})
    assert all(torch.equal(a, b) for a, b in zip(own.part(3), batch.part(3), strict=True))


def test_the_first_worker_puts_the_model_there_and_others_take_it(holdings_of):
    server = Through()
    models = []
    for worker in range(2):
        (holdings,) = holdings_of()
        model = network(seed=worker)
        added = holdings.models.add(model)
        holdings.models.agree(added)
        holdings.models.bind(added)
        Apart(holdings, server, environment_of(worker)).join()
        models.append(model)
    assert server.told[0]["put"] == sorted(network().state_dict())
    assert len(server.told) == 1
    for name, value in models[0].state_dict().items():
        assert torch.equal(value, models[1].state_dict()[name])


def test_layers_that_span_the_shards_of_all_workers_are_refused(holdings_of):
    (holdings,) = holdings_of()
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].spans_shards = True
    with pytest.raises(UnsupportedError, match=r"batch norm spans the shards of all workers.*sync_batchnorm=False"):
        Apart(holdings, Through(), environment_of()).admit(model)
    Apart(holdings, Through(), environment_of(0, 1)).admit(model)


def test_a_second_model_is_refused(holdings_of):
    (holdings,) = holdings_of()
    holdings.models.add(nn.Linear(1, 1))
    with pytest.raises(UnsupportedError, match="prepare was called twice"):
        Apart(holdings, Through(), environment_of()).admit(nn.Linear(1, 1))


def test_what_an_earlier_life_has_sent_is_left_out_and_its_last_results_are_known(holdings_of, events):
    (holdings,) = holdings_of()
    reader, writer = events
    apart = Apart(holdings, died_after(2), environment_of(job="job", events_fd=writer))
    assert json.loads(os.read(reader, 1000))["says"].startswith("worker 1 is back: the 2 updates that it has sent")
    assert (apart.results().loss, apart.results().metrics) == (0.5, {"hit": 2 / 3})
    for _ in range(2):
        assert apart.leaves_out
        apart.leave_out()
    assert not apart.leaves_out


def test_a_second_run_of_the_same_life_leaves_out_only_what_is_left(holdings_of, events):
    (holdings,) = holdings_of()
    server, env = died_after(2), environment_of(job="job", events_fd=events[1])
    first = Apart(holdings, server, env)
    first.leave_out()
    first.leave_out()
    server.done["worker-1.job"] = 7, server.done["worker-1.job"][1]
    assert not Apart(holdings, server, env).leaves_out


def test_a_synchronous_update_needs_what_died_with_the_worker(holdings_of, events):
    (holdings,) = holdings_of()
    server, (reader, writer) = died_after(3, staleness=0), events
    with pytest.raises(UnsupportedError, match="worker 1 died after 3 updates and was started again"):
        Apart(holdings, server, environment_of(job="job", events_fd=writer))
    assert json.loads(os.read(reader, 1000)) == {"final": True}
    assert server.open == 0


def test_before_its_first_step_there_are_no_results(holdings_of):
    (holdings,) = holdings_of()
    apart = Apart(holdings, Through(), environment_of())
    assert (apart.results().loss, apart.results().metrics) == (0.0, {})
    assert not apart.leaves_out


def test_a_checkpoint_holds_what_the_server_has(holdings_of):
    (holdings,) = holdings_of()
    apart = Apart(holdings, Through(values={"a": torch.ones(2)}), environment_of())
    assert list(apart.tensors()) == ["model.a"]
    assert apart.merge("x", {"loss": 1.0}, 3) == {"loss": 1.0}


@pytest.mark.parametrize("name", ["load", "checkpoint", "edit", "exchange"])
def test_what_would_see_this_worker_only_is_refused(holdings_of, name):
    (holdings,) = holdings_of()
    with pytest.raises(UnsupportedError, match=f"run.{name} in a run with a server would see this worker only"):
        Apart(holdings, Through(), environment_of()).refuse(name)
