"""Modules and data for tests of `evenstep.lightning`, and Trainers that are quiet about it."""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings(action="ignore"):  # theirs, about names and settings of torch
    import lightning as L
    from torchmetrics.classification import MulticlassAccuracy

logging.getLogger("lightning").handlers.clear()  # it writes to what was standard error when it was imported

NUM_SAMPLES, BATCH = 44, 12  # 12, 12, 12 and 8: parts of different sizes


def samples() -> TensorDataset:
    """Points that belong to one of three kinds."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


def loader(shuffle: bool = False, **options: Any) -> DataLoader[Any]:
    """Loads them."""
    return DataLoader(samples(), **{"batch_size": BATCH, "shuffle": shuffle, **options})


class Classifier(L.LightningModule):
    """An ordinary module."""

    def __init__(self, lr: float = 0.1, **layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.net = layers.get("net") or nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy.update(self(batch[0]), batch[1])
        self.log("val_loss", self.loss(batch))
        self.log("val_accuracy", self.accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def trainer(folder: Path, **options: Any) -> L.Trainer:
    """A Trainer that shows and writes nothing unless it is asked to."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    rest = {"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, "default_root_dir": folder}
    return L.Trainer(**{**quiet, **rest, **options})


def weights(module: nn.Module) -> dict[str, bytes]:
    """What a module has learnt, to the bit."""
    return {name: value.contiguous().view(torch.uint8).numpy().tobytes() for name, value in module.state_dict().items()}
