"""A loader whose batches have an index is loaded by shards; of any other only its own iteration gives the batches."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, default_collate

import evenstep
from evenstep.run.loaders import batches_of

DATA = TensorDataset(torch.arange(10.0))


class FakeRun:
    """Keeps what it is asked for."""

    def batches(self, dataset, **options):
        self.asked = dataset, options
        return "batches"


class OwnWay(DataLoader):
    def __iter__(self):
        return iter(())


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "loader",
    [[1, 2], OwnWay(DATA), DataLoader(Endless()), DataLoader(DATA, batch_size=None)],
    ids=["no loader", "its own way to iterate", "no index", "no batches"],
)
def test_what_only_iterating_gives_is_left_to_iterating(loader):
    run = FakeRun()
    assert batches_of(run, loader, train=True) is None
    assert not hasattr(run, "asked")


def test_the_samplers_of_the_loader_say_which_samples_a_batch_has():
    run, loader = FakeRun(), DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA))
    assert batches_of(run, loader, train=False) == "batches"
    dataset, options = run.asked
    assert dataset is DATA
    assert options == {
        "sampler": loader.batch_sampler, "collate_fn": None, "loaders": 0, "prefetch": 2, "train": False,
    }  # fmt: skip


def test_processes_and_a_collate_function_of_the_loader_are_kept():
    def collate(samples):
        return default_collate(samples)

    run = FakeRun()
    batches_of(run, DataLoader(DATA, batch_size=4, collate_fn=collate, num_workers=2, prefetch_factor=5), train=True)
    _, options = run.asked
    assert (options["collate_fn"], options["loaders"], options["prefetch"]) == (collate, 2, 5)


def test_batches_of_a_run_are_those_of_the_loader():
    loader = DataLoader(DATA, batch_size=4)
    with evenstep.Run(shards=2, quiet=True) as run:
        found = [torch.cat([batch.parts[k][0] for k in (0, 1)]) for batch in batches_of(run, loader, train=True)]
    assert [each.tolist() for each in found] == [batch[0].tolist() for batch in loader]
