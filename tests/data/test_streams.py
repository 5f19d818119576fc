"""Streams: every item once, by who computes the shard, at the same place whoever opened them before."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.data import stream
from evenstep.data.streams import StreamLoader, StreamReader

LENGTHS = [7, 4, 0, 5]


def numbers(epoch, shard):
    return (torch.tensor(1000 * epoch + 100 * shard + n) for n in range(LENGTHS[shard]))


def noisy(epoch, shard):
    """Draws from all generators, and as many numbers as the one before left it."""
    for _ in range(LENGTHS[shard]):
        yield [torch.rand(1 + random.randrange(3)).sum().item(), float(np.random.rand()), random.random()]


def loader(make=numbers, batch_size=8, span=lambda: range(4), skips=False, others=None, **more):
    """A worker with some shards; `others` says how many samples the other shards have in each batch."""

    def share(_, here):
        found = here()
        return [found[shard] if shard in found else others.pop(0) for shard in range(4)]

    return StreamLoader(stream(make, skips=skips), batch_size, 4, 3, span=span, share=share, **more)


def parts(batches):
    return [{k: batch.part(k).tolist() for k in range(4) if batch.sizes[k]} for batch in batches]


START = {"epoch": 0, "batch": 0}


def test_every_shard_reads_its_own_stream_until_all_have_ended():
    batches = list(loader().load([(0, START), (1, START)]))
    assert [batch.sizes for batch in batches] == 2 * [[2, 2, 0, 2], [2, 2, 0, 2], [2, 0, 0, 1], [1, 0, 0, 0]]
    found = parts(batches)
    assert found[0] == {0: [0, 1], 1: [100, 101], 3: [300, 301]}
    assert found[6] == {0: [1004, 1005], 3: [1304]}
    assert batches[2].position.after == {"epoch": 0, "batch": 3, "read": [6, 4, 0, 5]}


def test_a_batch_size_that_does_not_divide_is_cut_as_everywhere():
    batches = list(loader(batch_size=6).load([(0, START)]))
    assert batches[0].sizes == [2, 2, 0, 1]


@pytest.mark.parametrize("skips", [False, True])
def test_one_can_go_on_at_any_batch(skips):
    opened = []

    def make(epoch, shard, start=0):
        opened.append((shard, start))
        return list(numbers(epoch, shard))[start:]

    whole = list(loader(make, skips=skips).load([(0, START)]))
    for first, batch in enumerate(whole[:-1], start=1):
        again = list(loader(make, skips=skips).load([(0, batch.position.after)]))
        assert parts(again) == parts(whole[first:])
        assert [b.name for b in again] == [b.name for b in whole[first:]]
    assert ((0, 6) in opened) == skips


def test_randomness_depends_on_seed_epoch_shard_and_number_alone():
    state = torch.get_rng_state(), random.getstate()
    whole = list(loader(noisy, collate=torch.tensor).load([(0, START)]))
    expected = parts(whole)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    torch.manual_seed(99)
    again = list(loader(noisy, collate=torch.tensor).load([(0, whole[0].position.after)]))
    assert parts(again) == expected[1:]
    assert len({value for batch in expected for part in batch.values() for row in part for value in row}) == 3 * 16


def test_a_shard_that_comes_from_another_worker_is_read_from_where_it_stands():
    span = range(0, 2)
    batches = loader(span=lambda: span, others=[0, 2, 0, 2]).load([(0, START)])
    first = next(batches)
    assert first.sizes == [2, 2, 0, 2]
    second = next(batches)
    assert second.part(3).tolist() == [302, 303], "it is asked for after the sizes were shared"
    span = range(0, 4)
    assert parts(batches) == [{0: [4, 5], 3: [304]}, {0: [6]}]


def test_ready_parts_are_handed_on():
    class Pieces(IterableDataset):
        def __init__(self, shard):
            self.shard = shard

        def __iter__(self):
            return ({"x": torch.full((3, 2), 10.0 * self.shard + n)} for n in range(LENGTHS[self.shard]))

    def make(epoch, shard):
        return DataLoader(Pieces(shard), batch_size=None)

    batches = list(loader(make, batch_size=None).load([(0, START)]))
    assert batches[0].sizes == [3, 3, 0, 3]
    assert len(batches) == 7
    assert batches[1].part(1)["x"][0].tolist() == [11.0, 11.0]
    assert batches[1].position.after["read"] == [2, 2, 0, 2]


def test_streams_are_closed_when_nobody_needs_them():
    closed = []

    def make(epoch, shard):
        try:
            yield from numbers(epoch, shard)
        finally:
            closed.append(shard)

    reader = StreamReader(stream(make), 0)
    for shard in (0, 1, 3):
        reader.read(0, shard, 0, 2)
    reader.keep(range(0, 2))
    assert closed == [3]
    reader.read(0, 0, 4, 1)
    assert closed == [3, 0], "another place of a stream is another iterator"
    reader.close()
    assert sorted(closed) == [0, 0, 1, 3]
    batches = loader(make).load([(0, START)])
    next(batches)
    batches.close()
    assert len(closed) == 8


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: stream([1, 2]), r"stream got a list; expected a function of \(epoch, shard\)"),
        (lambda: loader(batch_size=3), r"batch_size=3 for a stream, expected at least 4"),
        (lambda: loader(batch_size=None, collate=list), r"collate_fn for a stream of ready parts"),
        (lambda: list(loader(lambda *_: []).load([(2, START)])), r"no stream gave a sample in epoch 2"),
        (
            lambda: list(loader().load([(0, {"epoch": 0, "batch": 3})])),
            r"which is not a position in streams of 4 shards",
        ),
        (lambda: list(loader().load([(0, {**START, "read": [1]})])), r"which is not a position in streams of 4 shards"),
    ],
)
def test_what_makes_no_sense_is_said(act, said):
    with pytest.raises((ConfigError, CheckpointError), match=said):
        act()


def test_a_stream_that_gives_something_else_the_second_time_is_refused():
    lengths = iter([3, 3, 3, 3, 1, 0])

    def make(epoch, shard):
        return iter([torch.tensor(0)] * next(lengths))

    span = range(4)
    batches = loader(make, span=lambda: span).load([(0, START)])
    first = next(batches)
    span = range(0, 1)
    with pytest.raises(ConfigError, match=r"stream of shard 1 in epoch 0 ended after 1 items, but gave 2 before"):
        StreamReader(stream(make), 3).read(0, 1, 2, 1)
    reader = StreamReader(stream(make), 3)
    assert reader.read(0, 1, 0, 2) == []
    assert first.sizes == [2, 2, 2, 2]
