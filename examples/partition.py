"""Which of five kinds of words is most frequent in a text: a network whose layers are cut by their features.

python examples/partition.py                 # one worker computes all parts
evenstep run -n 3 examples/partition.py      # three share them out: the same weights, bit for bit
evenstep graph examples/partition.py:model -n 3 --input 8,12:int64 --out net.svg
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
from evenstep.nn import partition


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.mlp = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 100))
        self.head = nn.Linear(100, 5)

    def forward(self, words):
        return self.head(torch.relu(self.mlp(self.embed(words).mean(1))))


with evenstep.Run(shards=4, seed=0) as run:
    words = torch.randint(0, 50, (2400, 12))
    kinds = F.one_hot(words % 5).sum(1).argmax(1)
    train, test = TensorDataset(words[:2000], kinds[:2000]), TensorDataset(words[2000:], kinds[2000:])
    model = Network()
    partition(
        model, {"embed": "feature", "mlp": "feature", "head": "input-feature"}, parts=3
    )  # 64, 400 and 100 in three
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in run.batches(train, batch_size=100, epochs=4):
        loss = run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
    scores = run.evaluate(test, batch_size=400, metrics=lambda part: {"accuracy": model(part[0]).argmax(1) == part[1]})
    run.print(f"accuracy {scores['accuracy']:.4f}")
    run.print("in a checkpoint:", ", ".join(model.state_dict()))
