"""What a page's script does not show, on several workers: one result for any number of them, and when one dies."""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from modules import Classifier, L, loader, trainer, weights
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from evenstep.lightning import Exact
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import WorkersFailed, cli_run, run_workers


class Pair(L.LightningModule):
    """Two networks with a loss each, as in a GAN, and two schedulers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.2))

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
        x, y = batch
        if optimizer_idx == 0:
            return (self.first(x) - x).square().mean()
        loss = nn.functional.cross_entropy(self.second(self.first(x + torch.randn_like(x))), y)
        self.log("second", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        first, second = SGD(self.first.parameters(), 0.1, momentum=0.9), Adam(self.second.parameters(), 0.1)
        return [first, second], [{"scheduler": StepLR(first, 2), "interval": "step"}, ExponentialLR(second, 0.9)]


class OneLoss(Classifier):
    """Two optimizers that step on one loss."""

    def configure_optimizers(self) -> Any:
        return [SGD(self.net[0].parameters(), 0.1), Adam(self.net[2].parameters(), 0.1)]


def resumed(folder: Path) -> dict[str, bytes]:
    """A model that was stopped in the middle of an epoch."""
    every = ModelCheckpoint(folder / "steps", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    first = trainer(folder, strategy=Exact(seed=3), callbacks=every, max_steps=6, enable_checkpointing=True)
    first.fit(Pair(), loader(shuffle=True))
    module, rest = Pair(), trainer(folder, strategy=Exact(seed=3), max_epochs=3)
    rest.fit(module, loader(shuffle=True), ckpt_path=folder / "steps" / "step=3.ckpt")
    return weights(module)


def everything(folder: Path) -> dict[str, Any]:
    """All that is tried, by its name."""
    warnings.simplefilter("ignore")  # theirs
    found: dict[str, Any] = {}
    pair, straight = Pair(), trainer(folder, strategy=Exact(seed=3), max_epochs=3)
    straight.fit(pair, loader(shuffle=True))
    found["two losses"] = weights(pair), {name: float(value) for name, value in straight.callback_metrics.items()}
    found["resumed"] = resumed(folder)
    one = OneLoss()
    trainer(folder, strategy=Exact(), accumulate_grad_batches=3).fit(one, loader(shuffle=True, num_workers=1))
    found["one loss"] = weights(one)
    after = trainer(folder, strategy=Exact())
    after.fit(one, loader())
    after.save_checkpoint(folder / "after.ckpt")
    saved = torch.load(folder / "after.ckpt", weights_only=True)  # on any worker: it is there
    found["after"] = weights(one), saved["evenstep"], saved["global_step"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one worker finds."""
    (found,) = run_workers(1, lambda _: everything(tmp_path_factory.mktemp("alone")))
    return found


def test_one_two_and_three_workers_come_to_the_same(tmp_path, alone):
    others = [
        run_workers(workers, lambda _, workers=workers: everything(tmp_path / str(workers))) for workers in (2, 3)
    ]
    assert alone["resumed"] == alone["two losses"][0], "as if it had never stopped"
    assert alone["after"][1] == {"steps": 8, "shards": 8, "seed": 0}
    for several in others:
        assert several == [alone] * len(several)


SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_on_workers import everything
found = everything(Path({folder!r}))
print("found", hashlib.sha256(repr(found).encode()).hexdigest())
"""


def test_who_dies_while_checkpoints_are_written_and_read_changes_nothing(tmp_path, script, alone):
    path = script(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path / "killed")))
    deaths = [Fault("kill", "after commit", visit, worker=worker) for visit, worker in ((40, 0), (75, 1))]
    killed = cli_run("run", "-n", "3", path, variables=plant(deaths, tmp_path / "faults"))
    assert killed.code == 0, killed.stderr
    assert struck(tmp_path / "faults") == [0, 1]
    said = {line.partition("found ")[2] for line in killed.stdout.splitlines() if "found " in line}
    assert said == {hashlib.sha256(repr(alone).encode()).hexdigest()}


def test_what_fails_fails_everywhere_and_leaves_the_checkpoint_that_was_asked_for(tmp_path):
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 5 and batch[1].sum() > 0:
                raise ValueError("the fifth step")
            return self.loss(batch)

    def body(_):
        warnings.simplefilter("ignore")
        kept = OnExceptionCheckpoint(tmp_path)
        trainer(tmp_path, strategy=Exact(), callbacks=kept, enable_checkpointing=True).fit(Failing(), loader())

    with pytest.raises(WorkersFailed) as failed:
        run_workers(2, body)
    assert {outcome.kind for outcome in failed.value.outcomes} <= {"ValueError", "PeerError"}
    assert all("the fifth step" in outcome.text for outcome in failed.value.outcomes)
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 5
    assert os.listdir(tmp_path) == ["on_exception.ckpt"]
