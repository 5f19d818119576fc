"""A character language model that draws its own batches, with padding that does not count.

evenstep run -n 3 examples/ports/language_model.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import evenstep

text = load_digits().DESCR
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
LENGTH, IGNORED = 32, -100


class Transformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed, self.place = nn.Embedding(len(letters), width), nn.Embedding(LENGTH, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True)
        self.out = nn.Linear(width, len(letters), bias=False)
        self.out.weight = nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.out(self.layer(self.embed(x) + self.place.weight, mask, is_causal=True))


def draw(generator, rows=24):
    """Pieces of the text, of which only some letters count. The same on every worker, by a generator of its own."""
    starts = torch.randint(0, len(data) - LENGTH, (rows,), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
    pieces = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:].where(torch.arange(LENGTH) < lengths, IGNORED)


with evenstep.Run(seed=0) as run:
    model = Transformer()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def loss_of(part):
        tokens, targets = part
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return evenstep.Loss(loss, weight=(targets != IGNORED).sum())

    generator = torch.Generator().manual_seed(1)
    for step in range(31):
        loss = run.step(draw(generator), loss_of, clip_norm=1.0)
        if step % 10 == 0:
            run.print(f"step {step}  loss {float(loss):.4f}")
