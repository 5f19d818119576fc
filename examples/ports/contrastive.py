"""A contrastive pair of encoders, as in CLIP: which upper half of a digit belongs to which lower half?

evenstep run -n 3 examples/ports/contrastive.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

halves = torch.tensor(load_digits().data / 16).float().split(32, 1)
train, test = TensorDataset(*(half[:1500] for half in halves)), TensorDataset(*(half[1500:1700] for half in halves))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.lower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, part):
        return F.normalize(self.upper(part[0])), F.normalize(self.lower(part[1]))


with evenstep.Run(seed=0) as run:
    model = Pair()
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=5e-3))

    def loss_of(part):
        upper, lower = model(part)
        labels = torch.arange(run.rows.start, run.rows.stop)
        forth = F.cross_entropy(model.scale.exp() * upper @ run.gather(lower).T, labels)
        back = F.cross_entropy(model.scale.exp() * lower @ run.gather(upper).T, labels)
        return (forth + back) / 2

    for epoch in range(3):
        for batch in run.batches(train, batch_size=150):
            loss = run.step(batch, loss_of)
        run.print(f"epoch {epoch}  loss {float(loss):.4f}")
    upper, lower = run.predict(test, 200, model)
    rank = ((upper @ lower.T) > (upper * lower).sum(1, keepdim=True)).float().sum(1).mean()
    run.print(f"of 200 lower halves {float(rank):.1f} fit better than the right one")
