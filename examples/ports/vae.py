"""A variational autoencoder, whose loss is a sum over samples and pixels.

evenstep run -n 3 examples/ports/vae.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

pixels = TensorDataset(torch.tensor(load_digits().data / 16).float())


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * 8))
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        noise = torch.randn_like(mean)  # seeded by (seed, step, shard)
        return self.decode(mean + noise * (log_variance / 2).exp()), mean, log_variance


def loss_of(model, x):
    found, mean, log_variance = model(x)
    likeness = F.binary_cross_entropy(found, x, reduction="sum")
    return likeness - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()


with evenstep.Run(seed=0) as run:
    model = VAE()
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    for epoch in range(3):
        for batch in run.batches(pixels, batch_size=128):
            run.step(batch, lambda part: loss_of(model, part[0]), reduction="sum")
        run.print(f"epoch {epoch}  loss of a batch {run.metrics()['loss']:.2f}")
    drawn = run.predict(pixels, 512, lambda part: model(part[0])[0])
    run.print(f"mean pixel {float(drawn.mean()):.4f}, of the data {float(pixels.tensors[0].mean()):.4f}")
