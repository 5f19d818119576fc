"""Small trainings for chaos runs: a network with batch norm and dropout, and a transformer. Run as a script."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep

__all__ = ["TRAININGS", "main"]


class Transformer(nn.Module):
    """Predicts the class of a short sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """[N, L] tokens to [N, 4] scores."""
        scores: Tensor = self.head(self.layers(self.embedding(tokens)).mean(1))
        return scores


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(6 * 36, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, 4),
    )


TRAININGS = ("batchnorm", "transformer")


def main() -> None:
    """Train one of them for some steps, with a scheduler and an evaluation after every epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("training", choices=TRAININGS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoints")
    options = parser.parse_args()
    with evenstep.Run(shards=6, seed=7, timeout_s=20.0) as run:
        kind = options.training
        inputs = torch.randn(120, 1, 6, 6) if kind == "batchnorm" else torch.randint(0, 20, (120, 5))
        data = TensorDataset(inputs, torch.randint(0, 4, (120,)))
        model = _network() if kind == "batchnorm" else Transformer()
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        if options.checkpoints:
            run.checkpoint(options.checkpoints, every=4)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        while run.version < options.steps:
            for batch in run.batches(data, batch_size=22):
                run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]), clip_norm=1.0)
                if run.version == options.steps:
                    break
            found = run.evaluate(data, 40, lambda part: {"loss": F.cross_entropy(model(part[0]), part[1])})
            scheduler.step(found["loss"])


if __name__ == "__main__":
    main()
