"""A residual network with batch norm on scikit-learn's handwritten digits.

python examples/digits.py                    # one worker
evenstep run -n 3 examples/digits.py         # three: the same weights, bit for bit
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenstep


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def build():
    first = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10)]
    return nn.Sequential(*first, Residual(32), nn.MaxPool2d(2), Residual(32), *last)


digits = load_digits()
images, labels = torch.tensor(digits.images / 16).float().unsqueeze(1), torch.tensor(digits.target)
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])

with evenstep.Run(shards=8, seed=0) as run:
    model = build()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for batch in run.batches(train, batch_size=128, epochs=6):
        loss = run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
    scores = run.evaluate(test, batch_size=512, metrics=lambda part: {"accuracy": model(part[0]).argmax(1) == part[1]})
    run.print(f"accuracy {scores['accuracy']:.4f}")
