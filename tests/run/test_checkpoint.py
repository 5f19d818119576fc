"""Checkpoints: what was saved on some workers goes on, to the bit, on others."""

import json

import pytest
import torch
import torch.nn.functional as F
from cases import images
from torch import nn
from torch.utils.data import Dataset

import evenstep
from evenstep.run import checkpoint
from workers import run_workers


class Noisy(Dataset):
    """Every look at a sample is another one."""

    def __init__(self):
        self.x, self.y = images(44).tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + torch.randn(3, 6, 6), self.y[index]


def build(run, width=4):
    model = nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16 * width, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5)  # its state has keys that are no text
    run.track("scheduler", scheduler)
    return (*run.prepare(model, optimizer), scheduler)


def train(folder=None, *, load=False, save_at=None, stop_at=None):
    """Two epochs of three batches; from a checkpoint on, or up to one."""
    with evenstep.Run(shards=4, seed=2, quiet=True) as run:
        model, optimizer, scheduler = build(run)
        if load:
            run.load(folder)
        losses = []
        for batch in run.batches(Noisy(), batch_size=16, epochs=2):
            losses.append(float(run.step(batch, lambda p: F.cross_entropy(model(p[0]), p[1]))))
            scheduler.step()
            if run.version == save_at:
                run.save(folder)
            if run.version == stop_at:
                break
        return run.fingerprint(), losses, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("save_at", [1, 3, 5])  # mid-epoch, at its end, in the second
def test_a_run_goes_on_from_a_checkpoint_on_any_number_of_workers(tmp_path, save_at):
    whole = train()
    first = run_workers(2, lambda _: train(tmp_path / "c", save_at=save_at, stop_at=save_at))
    assert first[0][1] == whole[1][:save_at]
    for count in (1, 3):
        for fingerprint, losses, rate in run_workers(count, lambda _: train(tmp_path / "c", load=True)):
            assert fingerprint == whole[0]
            assert losses == whole[1][save_at:]
            assert rate == whole[2]


def test_saving_again_replaces_the_checkpoint_and_changes_nothing_else(tmp_path):
    assert train(tmp_path, save_at=2) == train()
    train(tmp_path, save_at=4)
    assert len(list(tmp_path.iterdir())) == 2
    assert json.loads((tmp_path / "checkpoint.json").read_text())["version"] == 4


def refused(folder, match, **options):
    with evenstep.Run(**{"shards": 4, "seed": 2, "quiet": True, **options}) as run:
        build(run)
        before = run.fingerprint()
        with pytest.raises(evenstep.CheckpointError, match=match):
            run.load(folder)
        assert run.fingerprint() == before


def test_a_checkpoint_that_does_not_fit_is_refused_with_the_differences(tmp_path):
    train(tmp_path, save_at=1, stop_at=1)
    refused(tmp_path / "nowhere", "holds no checkpoint.json")
    refused(tmp_path, "shards: 4 in the checkpoint, 2 here", shards=2)
    refused(tmp_path, "seed: 2 in the checkpoint, 7 here", seed=7)
    with evenstep.Run(shards=4, seed=2, quiet=True) as run:
        build(run, width=5)
        with pytest.raises(
            evenstep.CheckpointError, match=r"model.0.bias: \(4,\) torch.float32 in the checkpoint, \(5,\)"
        ):
            run.load(tmp_path)
    (state,) = tmp_path.glob("*.safetensors")
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    refused(tmp_path, "was altered or torn")
    state.unlink()
    refused(tmp_path, "cannot be read")
    (tmp_path / "checkpoint.json").write_text("{")
    refused(tmp_path, "cannot be read")


def test_a_place_that_cannot_be_written_is_said_on_every_worker(tmp_path):
    (tmp_path / "file").write_text("")

    def body(_):
        with evenstep.Run(shards=2, quiet=True) as run:
            build(run)
            with pytest.raises(evenstep.CheckpointError, match="cannot write the checkpoint"):
                run.save(tmp_path / "file" / "inside")

    run_workers(2, body)


def test_a_second_loop_goes_on_with_the_next_epoch_also_after_a_checkpoint(tmp_path):
    def train(*, load, stop_at=None):
        with evenstep.Run(shards=2, seed=4, quiet=True) as run:
            model, _, _ = build(run)
            if load:
                run.load(tmp_path)
            seen = []
            for _ in range(3):
                for batch in run.batches(Noisy(), batch_size=16):
                    seen.append(float(run.step(batch, lambda p: F.cross_entropy(model(p[0]), p[1]))))
                    if run.version == stop_at:
                        run.save(tmp_path)
                        return run.fingerprint(), seen
            return run.fingerprint(), seen

    whole = train(load=False)
    assert len(whole[1]) == 9
    first = train(load=False, stop_at=5)
    fingerprint, rest = train(load=True)
    assert fingerprint == whole[0]
    assert first[1] + rest == whole[1]


def test_a_checkpoint_belongs_to_the_arithmetic_that_made_it(tmp_path):
    train(tmp_path, save_at=1, stop_at=1)
    facts = json.loads((tmp_path / checkpoint.FACTS).read_text())
    assert facts["arithmetic"] == "native"
    facts["tracked"] = {}
    here = {"shards": 4, "arithmetic": "portable"}
    with pytest.raises(evenstep.CheckpointError, match="arithmetic: native in the checkpoint, portable here"):
        checkpoint.check(tmp_path, facts, {}, here, {})
    del facts["arithmetic"]  # as of a version that knew no other
    checkpoint.check(tmp_path, facts, {}, {"shards": 4, "arithmetic": "native"}, {})
