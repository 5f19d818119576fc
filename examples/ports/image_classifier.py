"""An image classifier with batch norm, augmentation, a learning-rate schedule and an evaluation after every epoch.

evenstep run -n 3 examples/ports/image_classifier.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import evenstep

digits = load_digits()
images, labels = torch.tensor(digits.images / 16).float().unsqueeze(1), torch.tensor(digits.target)


class Shifted(Dataset):
    """Moves every image by a pixel, each time another way: random numbers of a sample are its own."""

    def __len__(self):
        return 1200

    def __getitem__(self, index):
        x, y = torch.randint(-1, 2, (2,)).tolist()
        return images[index].roll((x, y), (1, 2)), labels[index]


test = TensorDataset(images[1200:], labels[1200:])

with evenstep.Run(seed=0) as run:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)
    batches = run.batches(Shifted(), batch_size=100)
    for epoch in range(2):
        for batch in batches:
            loss = run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]), clip_norm=1.0)
        scheduler.step()
        scores = run.evaluate(test, 300, lambda part: {"accuracy": model(part[0]).argmax(1) == part[1]})
        run.print(f"epoch {epoch}  loss {float(loss):.4f}  accuracy {scores['accuracy']:.4f}")
