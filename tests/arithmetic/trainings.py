"""Trains small models for 20 steps each and prints the fingerprint of each: what must be the same on every processor.

It is the script of test_golden.py: `evenstep run -n N --arithmetic portable tests/arithmetic/trainings.py`. The
residual network is that of examples/digits.py, and trained there.
"""

import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

STEPS, BATCH = 20, 32


class Attentive(nn.Module):
    """A transformer with dropout over tokens [n, t]; logits of the next one."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, 48), nn.Parameter(torch.zeros(21, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.blocks, self.norm = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(48)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x, mask, is_causal=True)), self.embedding.weight)


class Recurrent(nn.Module):
    """A two-layer LSTM over [n, t, 12]; classes from its last state."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(12, 40, 2, batch_first=True), nn.Linear(40, 7)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Variational(nn.Module):
    """A convolutional VAE over images [n, 1, 16, 16]; returns its loss."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1),
            nn.SiLU(),
            nn.Conv2d(16, 32, 4, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(512, 16),
        )
        self.decoder = nn.Sequential(
            nn.Linear(8, 512), nn.Unflatten(1, (32, 4, 4)), nn.SiLU(),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        rebuilt = F.binary_cross_entropy_with_logits(self.decoder(sample), torch.sigmoid(x), reduction="none")
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
        return rebuilt.flatten(1).sum(1).mean() + divergence.sum(1).mean()


def mlp():
    data = torch.randn(256, 40), torch.randint(5, (256,))
    model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 70), nn.Tanh(), nn.Linear(70, 5))
    return data, model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), classify(model)


def transformer():
    model = Attentive()
    data = (torch.randint(50, (256, 22)),)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return data, model, optimizer, lambda p: F.cross_entropy(model(p[0][:, :-1]).flatten(0, 1), p[0][:, 1:].flatten())


def lstm():
    data, model = (torch.randn(256, 15, 12), torch.randint(7, (256,))), Recurrent()
    return data, model, torch.optim.Adam(model.parameters(), 1e-2), classify(model)


def vae():
    model = Variational()
    return (torch.randn(256, 1, 16, 16),), model, torch.optim.RMSprop(model.parameters(), 1e-3), lambda p: model(p[0])


def classify(model):
    return lambda part: F.cross_entropy(model(part[0]), part[1])


def train(make):
    with evenstep.Run(shards=8, seed=0, quiet=True) as run:
        data, model, optimizer, function = make()
        run.prepare(model, optimizer)
        epochs = STEPS * BATCH // len(data[0]) + 1
        for batch in run.batches(TensorDataset(*data), BATCH, epochs):
            run.step(batch, function)
            if run.version == STEPS:
                break
        run.print(json.dumps({"name": make.__name__, "fingerprint": run.fingerprint()}))


if __name__ == "__main__":
    for each in (mlp, transformer, lstm, vae):
        train(each)
