"""Loading: the same bytes whoever loads, nothing that is another worker's, and errors that say what happened."""

import math
import os
import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import processes
from evenstep.core.errors import ConfigError, SilenceError
from evenstep.data import loader as loader_module
from evenstep.data.loader import Loader, num_samples
from evenstep.data.order import Order
from evenstep.engine.reports import UNSTEADY
from workers import run_outcomes, run_workers

ORDER = Order(num_samples=37, batch_size=10, num_shards=4, seed=3, shuffle=True, drop_last=False)


class Augmented(Dataset):
    """Draws from all three generators, and from each so often that a stream which is not seeded anew would show."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        noise = torch.randn(4).sum() if index % 2 else torch.rand(9).sum()
        flip = random.random() < 0.5
        return {"x": torch.full((3,), float(index)) + noise, "np": np.random.rand(1 + flip)[-1], "index": index}


class Watched(Dataset):
    """Writes down which samples were asked for."""

    def __init__(self, failing=None):
        self.seen = []
        self.failing = failing

    def __len__(self):
        return 37

    def __getitem__(self, index):
        self.seen.append(index)
        if self.failing is not None:
            self.failing(index)
        return torch.tensor(index)


def load(dataset, span=range(4), loaders=0, epochs=(0, 1), collate=None, **changes):
    options = {"prefetch": 2, "timeout_s": 60.0, **changes}
    loader = Loader(dataset, lambda: span, ORDER.seed, "sample", collate=collate, loaders=loaders, **options)
    return loader.load(request for epoch in epochs for request in ORDER.requests(epoch))


def plain(part):
    """A part to the byte."""
    return {name: (str(t.dtype), tuple(t.shape), bytes(t.view(torch.uint8).numpy())) for name, t in part.items()}


def content(batches):
    return [(b.position, b.sizes, {k: plain(part) for k, part in b.parts.items()}) for b in batches]


def in_a_fork(body):
    """What the body returns; torch's signal handler for loader processes that die stays in the fork."""
    return run_workers(1, lambda _: body())[0]


def generators():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


# ---- the same samples everywhere ----


def test_loader_processes_draw_the_same_bytes_as_inline_loading():
    inline = content(load(Augmented()))
    assert len(inline) == 8
    for loaders in (1, 2):
        assert in_a_fork(lambda loaders=loaders: content(load(Augmented(), loaders=loaders))) == inline


def test_a_sample_does_not_depend_on_the_worker_that_loads_it():
    whole = list(load(Augmented()))
    for span in (range(0, 1), range(1, 3), range(3, 4)):
        for mine, all_of_it in zip(load(Augmented(), span=span), whole, strict=True):
            assert set(mine.parts) == set(span)
            assert mine.sizes == all_of_it.sizes
            assert len(mine) == len(all_of_it)
            for k in span:
                assert plain(mine.parts[k]) == plain(all_of_it.parts[k])


def test_an_augmentation_is_another_in_every_epoch():
    first, again = (
        {s: v for b in load(Augmented(), epochs=[e]) for p in b.parts.values() for s, v in pairs(p)} for e in (0, 1)
    )
    assert set(first) == set(again) == set(range(37))
    assert all(first[index] != again[index] for index in first)


def pairs(part):
    return zip(part["index"].tolist(), part["np"].tolist(), strict=True)


def test_a_worker_loads_the_samples_of_its_own_shards_and_no_others():
    dataset = Watched()
    list(load(dataset, span=range(1, 3)))
    mine = [index for epoch in (0, 1) for r in ORDER.requests(epoch) for k in (1, 2) for index in r.shards[k]]
    assert dataset.seen == mine


def test_loading_ahead_is_bounded():
    def body():
        asked = []

        def requests():
            for request in ORDER.requests(0):
                asked.append(request.position.number)
                yield request

        loader = Loader(Augmented(), lambda: range(4), 0, "sample", collate=None, loaders=1, prefetch=2, timeout_s=60.0)
        batches = loader.load(requests())
        next(batches)
        batches.close()
        return asked

    assert in_a_fork(body) == [0, 1, 2]


def test_an_empty_shard_has_no_part():
    order = Order(3, 3, 4, 0, False, False)
    loader = Loader(Watched(), lambda: range(2, 4), 0, "sample", collate=None, loaders=0, prefetch=1, timeout_s=1.0)
    (batch,) = loader.load(order.requests(0))
    assert set(batch.parts) == {2}
    assert batch.sizes == [1, 1, 1, 0]


def test_plain_tensors_are_taken_at_once_and_come_out_as_if_one_by_one():
    tensors = TensorDataset(torch.randn(37, 5), torch.arange(37))

    class OneByOne(Dataset):
        def __len__(self):
            return len(tensors)

        def __getitem__(self, index):
            return tensors[index]

    for fast, slow in zip(load(tensors), load(OneByOne()), strict=True):
        assert fast.parts.keys() == slow.parts.keys()
        for k in fast.parts:
            assert all(torch.equal(a, b) for a, b in zip(fast.parts[k], slow.parts[k], strict=True))
            assert type(fast.parts[k]) is type(slow.parts[k])


@pytest.mark.parametrize("loaders", [0, 1])
def test_the_callers_collate_function_makes_the_parts(loaders):
    def body():
        return next(load(Watched(), loaders=loaders, collate=lambda samples: [int(s) for s in samples])).parts

    request = next(ORDER.requests(0))
    assert in_a_fork(body) == {k: list(request.shards[k]) for k in range(4)}


@pytest.mark.parametrize("loaders", [0, 2])
def test_loading_leaves_the_callers_generators_as_they_were(loaders):
    def body():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        before = generators()
        batches = load(Augmented(), loaders=loaders)
        next(batches)
        assert generators() == before
        list(batches)
        assert generators() == before

    in_a_fork(body)


def test_samples_are_drawn_with_one_thread_whatever_the_caller_has():
    seen = []
    dataset = Watched(failing=lambda _: seen.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    try:
        next(load(dataset))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {1}


# ---- errors ----


def fail(index):
    if index == 7:
        raise KeyError("sample seven is broken")


@pytest.mark.parametrize("loaders", [0, 2])
def test_an_exception_in_a_data_set_comes_with_its_traceback(loaders):
    (outcome,) = run_outcomes(1, lambda _: list(load(Watched(failing=fail), loaders=loaders)))
    assert outcome.kind == "KeyError"
    assert "sample seven is broken" in outcome.text
    assert "in fail" in outcome.text


def test_a_loader_process_that_is_killed_is_an_error_and_no_wait():
    def die(index):
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    def body(_):
        before = signal.getsignal(signal.SIGCHLD)
        batches = load(Watched(failing=die), loaders=2, timeout_s=600.0)
        first = next(batches)
        assert signal.getsignal(signal.SIGCHLD) is before, "a handler that raises anywhere leaves locks behind"
        return [first, *batches]

    (outcome,) = run_outcomes(1, body)
    assert outcome.kind == "EvenstepError", outcome.text
    assert "a loader process ended while a batch was awaited" in outcome.text
    assert "use fewer loaders" in outcome.text


def test_a_loader_process_that_says_nothing_is_an_error_after_the_timeout():
    reading, writing = os.pipe()  # what the loader process waits for

    class NoticedError(SilenceError):
        def __init__(self, text):
            os.write(writing, b"noticed")
            super().__init__(text)

    def body(_):
        loader_module.SilenceError = NoticedError
        return list(load(Watched(failing=lambda index: index or os.read(reading, 1)), loaders=1, timeout_s=0.5))

    (outcome,) = run_outcomes(1, body)
    os.close(reading)
    os.close(writing)
    assert outcome.kind == NoticedError.__name__
    assert "no batch came from the loader processes within 0.5 s" in outcome.text


def test_no_timeout_is_no_error():
    assert in_a_fork(lambda: len(list(load(Watched(), loaders=1, timeout_s=math.inf)))) == 8


def test_a_caller_that_goes_away_early_leaves_no_process():
    def body():
        for batch in load(Augmented(), loaders=2):
            assert batch.number == 0
            break
        return list(processes.descendants())

    assert in_a_fork(body) == []


def test_a_stream_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"range_iterator without __getitem__ and __len__.*evenstep\.data\.stream"):
        load(iter(range(3)))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3


def test_a_stream_that_knows_its_length_and_a_loader_are_refused_with_what_to_pass():
    with pytest.raises(ConfigError, match=r"Stream without __getitem__.*can go to run\.step"):
        num_samples(Stream())
    with pytest.raises(ConfigError, match=r"is a DataLoader; expected what it loads from: pass loader\.dataset"):
        num_samples(torch.utils.data.DataLoader(range(3)))
    assert num_samples(range(3)) == 3


@pytest.mark.parametrize("changes", [{"loaders": -1}, {"prefetch": 0}], ids=str)
def test_numbers_that_make_no_sense_are_refused(changes):
    with pytest.raises(ConfigError, match="expected loaders >= 0 and prefetch >= 1"):
        load(Watched(), **changes)


def compared(dataset, loaders=0, skip=False, span=range(4)):
    """What workers compare of the first batch, and what they have of it."""
    loader = Loader(dataset, lambda: span, ORDER.seed, "sample", loaders=loaders, skip=lambda: skip)
    requests = (replace(request, is_compared=n == 0) for n, request in enumerate(ORDER.requests(0)))
    batches = loader.load(requests)
    first, second, *_ = batches
    assert second.probes is None
    return first.contents()


@pytest.mark.parametrize("dataset", [Augmented(), TensorDataset(torch.arange(37), torch.arange(37) % 5)])
def test_whoever_draws_them_the_samples_to_compare_are_the_same(dataset):
    expected = compared(dataset)
    assert expected
    assert all(path.startswith("sample") for path in expected)
    assert compared(dataset, span=range(1, 2)) == compared(dataset, loaders=2, span=range(3, 4)) == expected
    assert compared(dataset, skip=True) == compared(dataset, loaders=2, skip=True) == expected


def test_a_part_of_the_first_batch_is_enough_to_see_other_data():
    found = compared(TensorDataset(torch.arange(37) + 1))
    assert found != compared(TensorDataset(torch.arange(37)))

    class Shifted(Watched):
        def __getitem__(self, index):
            return super().__getitem__(index) + 1

    first, second = compared(Watched()), compared(Shifted())
    assert len(first) == 3
    assert first.keys() == second.keys()
    assert all(first[path] != second[path] for path in first)


def test_samples_are_compared_only_if_somebody_asks():
    dataset = Watched()
    loader = Loader(dataset, lambda: range(0), ORDER.seed, "sample")
    (first, *_) = loader.load(replace(request, is_compared=True) for request in ORDER.requests(0))
    assert dataset.seen == []
    first.contents()
    first.contents()
    assert len(dataset.seen) == 6, "three samples, each of them twice"


class WithItsOwnGenerator(Watched):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index):
        return index, self.generator.random()


def test_a_sample_that_is_another_one_when_drawn_again_is_marked():
    loader = Loader(WithItsOwnGenerator(), lambda: range(0), ORDER.seed, "sample")
    (first, *_) = loader.load(replace(request, is_compared=True) for request in ORDER.requests(0))
    assert [*first.contents().values()] == [UNSTEADY] * 3


def test_a_part_that_is_put_together_otherwise_the_second_time_is_marked():
    generator, sizes = np.random.default_rng(0), []

    def collate(samples):
        sizes.append(len(samples))
        return generator.random()

    loader = Loader(Watched(), lambda: range(0), ORDER.seed, "sample", collate=collate)
    (first, *_) = loader.load(replace(request, is_compared=True) for request in ORDER.requests(0))
    assert first.contents()["samples of a part"] == UNSTEADY
    assert sizes == [first.sizes[0]] * 2
