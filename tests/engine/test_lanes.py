"""Shards side by side take turns: each with its own stream, leaves and buffers, meeting in layers, failing together."""

import threading

import pytest
import torch
from torch import nn

from evenstep.engine.lanes import Crew, Lanes
from evenstep.engine.randomness import Stream, preserved
from evenstep.engine.slots import Lane, ModelSlots
from evenstep.exchange.surroundings import current

CREW = Crew(lambda tag, rows: rows, lambda tag, mine: [mine], [[4, 5, 6]], 0, 7, False)


class Rig:
    """Three lanes over one small model."""

    def __init__(self):
        self.turns = []
        torch.manual_seed(1)
        self.model, self.slots = nn.Linear(2, 1), ModelSlots()
        self.slots.add(self.model, "model")
        self.lanes = [Lane(self.slots, own=True) for _ in range(3)]
        self.running = Lanes(timeout_s=60.0, tracer=self)

    def note(self, kind, begin_ns, *, number):
        self.turns.append((kind.name, number))

    def run(self, *functions, seeds=(1, 2, 3)):
        streams = [Stream() for _ in functions]
        for stream, seed in zip(streams, seeds, strict=False):
            stream.reseed(seed)
        for lane in self.lanes:
            lane.begin({})
        rows = [range(10 * n, 10 * n + 2) for n in range(len(functions))]
        with preserved():
            try:
                return self.running.run(
                    [4, 5, 6][: len(functions)],
                    self.lanes[: len(functions)],
                    streams,
                    "step 2: ",
                    CREW,
                    rows,
                    functions,
                )
            finally:
                self.slots.bind_base()


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.running.close()


def meet(value, tag="sum"):
    """All meet; everyone gets the sum."""
    return current().meet(tag, value, lambda values: [sum(values)] * len(values))


def test_one_runs_at_a_time_and_everyone_gets_what_the_first_makes_of_all(rig):
    inside, most = [], []

    def function(value):
        def body():
            inside.append(value)
            most.append(len(inside))
            found = value + torch.rand(1).item() * 0
            inside.remove(value)
            return meet(found)

        return body

    assert rig.run(function(1), function(10), function(100)) == [111] * 3
    assert max(most) == 1
    assert sorted(rig.turns) == sorted([("FORWARD", shard) for shard in (4, 5, 6)] * 2), "one before it, one after"
    assert rig.run(function(1), function(2)) == [3] * 2, "and again with fewer"


def test_each_draws_from_its_own_stream_across_meetings(rig):
    def body():
        first = torch.rand(2)
        meet(0)
        return torch.cat([first, torch.rand(2)])

    found = rig.run(body, body, body, seeds=(7, 8, 9))
    for seed, drawn in zip((7, 8, 9), found, strict=True):
        alone = torch.Generator().manual_seed(seed)
        assert torch.equal(drawn, torch.cat([torch.rand(2, generator=alone), torch.rand(2, generator=alone)]))


def test_each_computes_with_its_own_leaves_on_both_sides_of_a_meeting(rig):
    def body():
        before = rig.model.weight
        meet(0)
        assert rig.model.weight is before
        return before

    found = rig.run(body, body, body)
    assert [f is lane.leaves["model.weight"] for f, lane in zip(found, rig.lanes, strict=True)] == [True] * 3


def test_grad_mode_stays_with_its_shard(rig):
    def without():
        with torch.no_grad():
            meet(0)
            return torch.is_grad_enabled()

    def with_gradients():
        meet(0)
        return torch.is_grad_enabled()

    assert rig.run(without, with_gradients) == [False, True]


def test_what_a_layer_sees(rig):
    seen = []

    def body():
        here = current()
        seen.append((here.shard, here.rows, here.shards, here.num_shards, here.is_whole))
        assert [here.call_number(rig), here.call_number(rig), here.call_number(self_)] == [0, 1, 0]
        return torch.equal(here.gather("tag", torch.ones(2)), torch.ones(2))

    self_ = object()
    assert rig.run(body, body) == [True, True]
    assert [s[0] for s in seen] == [4, 5]
    assert [s[1] for s in seen] == [range(0, 2), range(10, 12)]
    assert seen[0][2:] == ([[4, 5, 6]], 7, False)


def test_an_error_names_its_shard_and_ends_the_others(rig):
    def fails():
        raise LookupError("data")

    def waits():
        return meet(1)

    with pytest.raises(LookupError, match="data") as caught:
        rig.run(waits, fails, waits)
    assert "in shard 5" in caught.value.__notes__
    assert rig.run(waits, waits) == [2, 2], "and the next step is computed"


def test_a_shard_that_does_not_come_to_a_meeting_is_an_error(rig):
    with pytest.raises(Exception, match="shard 5"):
        rig.run(lambda: meet(1), lambda: None)


def test_the_first_shard_s_token_is_handed_on(rig):
    token = torch.ones(1)

    def body():
        current().token = token

    rig.run(body, body)
    assert rig.running.token is token


def test_threads_are_gone_afterwards():
    rig = Rig()
    rig.run(lambda: 1, lambda: 2)
    rig.running.close()
    assert not [t for t in threading.enumerate() if "lane" in t.name]
