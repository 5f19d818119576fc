"""A generative adversarial network: two models, two optimizers, two steps for every batch.

evenstep run -n 3 examples/ports/gan.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import evenstep

digits = load_digits()
real = TensorDataset(torch.tensor(digits.data[digits.target == 0] / 8 - 1).float())

with evenstep.Run(seed=0) as run:
    generator = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    generator, optimizer_g = run.prepare(generator, torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.999)))
    critic, optimizer_c = run.prepare(critic, torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.5, 0.999)))

    def made(part):
        return generator(torch.randn(len(part[0]), 8))

    def judged(x, is_real):
        found = critic(x)
        return F.binary_cross_entropy_with_logits(found, torch.full_like(found, float(is_real)))

    def loss_of_the_critic(part):
        return judged(part[0], is_real=True) + judged(made(part).detach(), is_real=False)

    for epoch in range(6):
        for batch in run.batches(real, batch_size=44, drop_last=True):
            loss_c = run.step(batch, loss_of_the_critic, optimizer_c)
            loss_g = run.step(batch, lambda part: judged(made(part), is_real=True), optimizer_g)
        run.print(f"epoch {epoch}  critic {float(loss_c):.4f}  generator {float(loss_g):.4f}")
    drawn = run.predict(real, 178, made).mean(0)
    likeness = torch.corrcoef(torch.stack([drawn, real.tensors[0].mean(0)]))[0, 1]
    run.print(f"a mean zero and a mean drawn one correlate by {float(likeness):.3f}")
