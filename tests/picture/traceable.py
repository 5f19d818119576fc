"""Models that can be traced in one way or another."""

import torch
from torch import nn


class Residual(nn.Module):
    """Traced by fx: a branch, a parameter of its own, a shared layer and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        y = self.first(torch.relu(self.first(x))) * self.scale
        return self.last(self.norm(y) + x)


class Branching(nn.Module):
    """Decides by the shape of its input in a way that fx cannot follow; torch.export can."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        for _ in range(len(x)):
            x = self.a(x)
        return self.b(x) + self.shift


class Untraceable(nn.Module):
    """Decides by values, so that nobody can follow."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        if float(x.sum()) > 0:
            return self.a(x)
        return self.b(x)
