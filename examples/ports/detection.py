"""Lists instead of tensors: images of different sizes, with different numbers of boxes, as in detection.

evenstep run -n 3 examples/ports/detection.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import evenstep


class Squares(Dataset):
    """Dark images of random sizes with one to three bright squares."""

    def __len__(self):
        return 240

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        height, width = torch.randint(16, 25, (2,), generator=generator).tolist()
        count = int(torch.randint(1, 4, (), generator=generator))
        corners = torch.rand(count, 2, generator=generator) * torch.tensor([height - 4, width - 4])
        boxes = torch.cat([corners, corners + 4], 1).long()
        image = 0.1 * torch.rand(1, height, width, generator=generator)
        for top, left, bottom, right in boxes.tolist():
            image[:, top:bottom, left:right] = 1
        return image, boxes


def collate(samples):
    images, boxes = zip(*samples, strict=True)
    return list(images), list(boxes)


def loss_of_one(model, image, boxes):
    """Which cells of 4 x 4 pixels does a square begin in?"""
    found = model(image)[0]
    cells = (boxes[:, :2] // 4).clamp(max=torch.tensor(found.shape) - 1)
    target = torch.zeros_like(found)
    target[cells[:, 0], cells[:, 1]] = 1
    return F.binary_cross_entropy_with_logits(found, target)


with evenstep.Run(seed=0) as run:
    first, second = nn.Conv2d(1, 16, 4, stride=4), nn.Conv2d(16, 16, 3, padding=1)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Conv2d(16, 1, 1))
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))

    def loss_of(part):
        return torch.stack([loss_of_one(model, image, boxes) for image, boxes in zip(*part, strict=True)]).mean()

    for epoch in range(3):
        for batch in run.batches(Squares(), batch_size=24, collate_fn=collate):
            loss = run.step(batch, loss_of)
        run.print(f"epoch {epoch}  loss {float(loss):.4f}")
    whole = collate([Squares()[n] for n in range(12)])  # a list that the script brings is cut into samples too
    run.print(f"loss of a whole list {float(run.step(whole, loss_of)):.4f}")
