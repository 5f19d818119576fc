"""Fine-tuning with adapters of low rank (LoRA): a network learns five digits, then adapters in it learn the others.

evenstep run -n 3 examples/ports/adapters.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

digits = load_digits()
pixels, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
low = TensorDataset(pixels[labels < 5], labels[labels < 5])
high = TensorDataset(pixels[labels >= 5], labels[labels >= 5] - 5)


class Adapted(nn.Module):
    """A layer that stays as it is, and two small matrices beside it."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def train(run, model, data, epochs):
    trained = [p for p in model.parameters() if p.requires_grad]
    model, _ = run.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    for batch in run.batches(data, batch_size=90, epochs=epochs):
        run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
    scores = run.evaluate(data, 300, lambda part: {"accuracy": model(part[0]).argmax(1) == part[1]})
    run.print(f"{sum(p.numel() for p in trained)} trained parameters  accuracy {scores['accuracy']:.4f}")


model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
with evenstep.Run(seed=0) as run:
    for layer in model:
        getattr(layer, "reset_parameters", lambda: None)()  # seeded by the run
    train(run, model, low, epochs=2)

with evenstep.Run(seed=1) as run:  # the model is an ordinary one again, and may be changed
    for number in (0, 2):
        model[number] = Adapted(model[number])
    train(run, model, high, epochs=3)
