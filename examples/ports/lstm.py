"""An LSTM that reads a text in columns and hands its state on from step to step.

evenstep run -n 3 examples/ports/lstm.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import evenstep

text = load_digits().DESCR
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
ROWS, LENGTH, WIDTH = 16, 10, 32
columns = data[: len(data) // ROWS * ROWS].reshape(ROWS, -1)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(len(letters), WIDTH), nn.Dropout(0.1)
        self.lstm, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, len(letters))

    def forward(self, x, state):
        found, state = self.lstm(self.drop(self.embed(x)), state)
        return self.out(found), state


with evenstep.Run(seed=0) as run:
    model = Reader()
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=2e-2))
    hidden = run.carry(lambda rows: (torch.zeros(1, rows, WIDTH), torch.zeros(1, rows, WIDTH)))

    def loss_of(part):
        output, state = model(part[0], hidden.get())
        hidden.set(state)
        return F.cross_entropy(output.flatten(0, 1), part[1].flatten())

    for epoch in range(2):
        hidden.reset()
        for start in range(0, columns.shape[1] - LENGTH - 1, LENGTH):
            piece = columns[:, start : start + LENGTH + 1]
            loss = run.step((piece[:, :-1], piece[:, 1:]), loss_of, clip_norm=0.25)
        run.print(f"epoch {epoch}  loss {float(loss):.4f}")
