"""Small trainings of every kind. Each takes a run and returns every number that a user would see."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import evenstep

Seen = list[float]
CASES: dict[str, Callable[[evenstep.Run], Seen]] = {}


def case(function: Callable[[evenstep.Run], Seen]) -> Callable[[evenstep.Run], Seen]:
    CASES[function.__name__] = function
    return function


def images(count: int = 44, size: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 3, size, size, generator=generator), torch.randint(0, 4, (count,), generator=generator)
    )


def tokens(count: int = 40, length: int = 7) -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    return TensorDataset(torch.randint(0, 11, (count, length), generator=generator))


def train(
    run: evenstep.Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: TensorDataset | None = None,
    loss: Callable[[nn.Module, Any], Any] = lambda model, part: F.cross_entropy(model(part[0]), part[1]),
    batch_size: int = 18,  # leaves 8 of 44: uneven shards, then one sample each
    epochs: int = 2,
    after_step: Callable[[], None] = lambda: None,
    prepare: dict[str, Any] | None = None,
    **options: Any,
) -> Seen:
    model, optimizer = run.prepare(model, optimizer, **(prepare or {}))
    seen: Seen = []
    for batch in run.batches(dataset or images(), batch_size=batch_size, epochs=epochs):
        found = run.step(batch, lambda part: loss(model, part), **options)
        seen += [float(found[0]), *found[1].values()] if isinstance(found, tuple) else [float(found)]
        after_step()
    return seen


def flat(*more: nn.Module, inputs: int = 108) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 12), *more, nn.ReLU(), nn.Linear(12, 4))


@case
def convolutions_with_batch_norm_and_dropout(run: evenstep.Run) -> Seen:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8, momentum=None), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip
    seen = train(run, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    return seen + list(run.evaluate(images(), 16, lambda part: {"x": F.cross_entropy(*_out(model, part))}).values())


def _out(model: nn.Module, part: Any) -> tuple[Tensor, Tensor]:
    return model(part[0]), part[1]


@case
def batch_norm_left_per_shard(run: evenstep.Run) -> Seen:
    model = flat(nn.BatchNorm1d(12))
    return train(run, model, torch.optim.SGD(model.parameters(), 0.1), batch_size=22, prepare={"sync_batchnorm": False})


@case
def parallel_branches_with_batch_norm(run: evenstep.Run) -> Seen:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)
            self.bn_a, self.bn_b, self.shared = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.bn_a(self.a(x)).relu(), self.bn_b(self.b(x)).relu()
            return self.head(torch.cat([self.shared(a), self.shared(b)], 1).mean((2, 3)))

    model = Branches()
    return train(run, model, torch.optim.Adam(model.parameters()))


@case
def a_transformer_with_tied_weights(run: evenstep.Run) -> Seen:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True)
            self.out = nn.Linear(16, 11, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.out(self.layer(self.embed(x)))}

    model = Language()

    def loss(model: nn.Module, part: Any) -> Any:
        logits = model(part[0][:, :-1])["logits"]
        found = F.cross_entropy(logits.flatten(0, 1), part[0][:, 1:].flatten())
        return found, {"right": (logits.argmax(-1) == part[0][:, 1:]).float().mean(1), "mean": found.detach()}

    return train(run, model, torch.optim.AdamW(model.parameters(), 1e-2), tokens(), loss, clip_norm=0.5)


@case
def an_lstm_beside_batch_norm(run: evenstep.Run) -> Seen:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 6, num_layers=2, batch_first=True)
            self.bn, self.out = nn.BatchNorm1d(6), nn.Linear(6, 11)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.bn(self.lstm(self.embed(x))[0][:, -1]))

    model = Recurrent()
    return train(
        run, model, torch.optim.Adam(model.parameters(), 1e-2), tokens(),
        lambda model, part: F.cross_entropy(model(part[0][:, :-1]), part[0][:, -1]),
    )  # fmt: skip


@case
def bfloat16_autocast(run: evenstep.Run) -> Seen:
    model = flat(nn.BatchNorm1d(12))

    def loss(model: nn.Module, part: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(part[0]), part[1])

    return train(run, model, torch.optim.SGD(model.parameters(), 0.1), loss=loss)


@case
def bfloat16_parameters(run: evenstep.Run) -> Seen:
    model = flat().bfloat16()
    loss = lambda model, part: F.cross_entropy(model(part[0].bfloat16()).float(), part[1])  # noqa: E731  # short
    return train(run, model, torch.optim.SGD(model.parameters(), 0.1), loss=loss)


@case
def float64_and_channels_last(run: evenstep.Run) -> Seen:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    model = model.double().to(memory_format=torch.channels_last)
    loss = lambda model, part: F.cross_entropy(  # noqa: E731  # short
        model(part[0].double().to(memory_format=torch.channels_last)), part[1]
    )
    return train(run, model, torch.optim.SGD(model.parameters(), 0.1), loss=loss)


@case
def schedulers_groups_and_clipping(run: evenstep.Run) -> Seen:
    model = flat()
    groups = [{"params": model[1].parameters(), "lr": 0.2}, {"params": model[3].parameters(), "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.3, 0.2], total_steps=20)
    seen = train(run, model, optimizer, after_step=scheduler.step, clip_norm=0.3, clip_value=0.01)
    return [*seen, run.grad_norm or 0.0, *scheduler.get_last_lr()]


@case
def frozen_unused_and_sometimes_used_parameters(run: evenstep.Run) -> Seen:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.never = flat(), nn.Linear(3, 3)
            self.sometimes, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.frozen(self.body(x))
            return self.sometimes(y) if x.sum() > 0 else y

    model = Model()
    return train(run, model, torch.optim.AdamW(model.parameters(), 1e-2))


@case
def buffers_that_forward_changes(run: evenstep.Run) -> Seen:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = flat()
            self.register_buffer("total", torch.zeros(()))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x.mean().detach()
            self.calls += 1
            return self.body(x) * (1 + 0.01 * self.total)

    model = Model()
    seen = train(run, model, torch.optim.SGD(model.parameters(), 0.1))
    return [*seen, float(model.total), float(model.calls)]


@case
def randomness_of_every_kind(run: evenstep.Run) -> Seen:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Flatten(), nn.Linear(108, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = x * random.uniform(0.5, 1.5) + torch.randn_like(x) * float(np.random.rand())
            y = self.body(x)  # the batch norm in between makes the shards of a worker take turns
            return y * random.uniform(0.5, 1.5) + torch.rand(()) + np.random.standard_normal()

    model = Noisy()
    seen = train(run, model, torch.optim.SGD(model.parameters(), 0.1))
    return [*seen, float(torch.rand(())), float(np.random.rand()), random.random()]


@case
def a_gan(run: evenstep.Run) -> Seen:
    generator = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 108))
    critic = nn.Sequential(nn.Linear(108, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    generator, opt_g = run.prepare(generator, torch.optim.Adam(generator.parameters(), 1e-3))
    critic, opt_d = run.prepare(critic, torch.optim.SGD(critic.parameters(), 1e-2))

    def critic_loss(part: Any) -> Tensor:
        fake = generator(torch.randn(len(part[0]), 4)).detach()
        return critic(fake).mean() - critic(part[0].flatten(1)).mean()

    seen: Seen = []
    for batch in run.batches(images(), batch_size=20, epochs=2):
        seen.append(float(run.step(batch, critic_loss, optimizer=opt_d)))
        loss = run.step(batch, lambda part: -critic(generator(torch.randn(len(part[0]), 4))).mean(), optimizer=opt_g)
        seen.append(float(loss))
    return seen


@case
def batches_smaller_than_the_number_of_shards(run: evenstep.Run) -> Seen:
    model = flat(nn.BatchNorm1d(12))
    return train(run, model, torch.optim.Adam(model.parameters()), dataset=images(13), batch_size=5)


@case
def plain_tensors_as_batches(run: evenstep.Run) -> Seen:
    model = flat()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    x, y = images().tensors
    return [
        float(run.step({"x": x[n:], "y": y[n:]}, lambda part: F.cross_entropy(model(part["x"]), part["y"])))
        for n in range(4)
    ]


@case
def a_contrastive_loss_over_the_whole_batch(run: evenstep.Run) -> Seen:
    model = flat()

    def loss(model: nn.Module, part: Any) -> Tensor:
        found = F.normalize(model(part[0]))
        return F.cross_entropy(found @ run.gather(found).T / 0.1, torch.arange(run.rows.start, run.rows.stop))

    return train(run, model, torch.optim.SGD(model.parameters(), 0.1), loss=loss)


@case
def an_lstm_with_carried_state(run: evenstep.Run) -> Seen:
    model = nn.LSTM(7, 6, batch_first=True)
    model, _ = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
    hidden = run.carry(lambda rows: (torch.zeros(1, rows, 6), torch.zeros(1, rows, 6)))

    def function(part: Any) -> Tensor:
        output, state = model(part, hidden.get())
        hidden.set(state)
        return output.square().mean()

    text = torch.arange(9 * 24 * 7.0).reshape(9, 24, 7).sin()
    return [float(run.step(text[:, n : n + 4], function)) for n in range(0, 24, 4)]


@case
def two_optimizers_on_one_backward(run: evenstep.Run) -> Seen:
    model = flat(nn.BatchNorm1d(12))
    model, first = run.prepare(model, torch.optim.Adam([p for p in model.parameters() if p.ndim == 2]))
    model, second = run.prepare(model, torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], 0.1))
    seen: Seen = []
    for batch in run.batches(images(), batch_size=18, epochs=2):
        loss = run.step(batch, lambda part: F.cross_entropy(*_out(model, part)), [first, second], clip_norm=0.5)
        seen += [float(loss), run.grad_norm or 0.0]
    return seen


@case
def scaled_losses_that_are_sums(run: evenstep.Run) -> Seen:
    model = flat()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    loss = lambda model, part: F.cross_entropy(*_out(model, part), reduction="sum")  # noqa: E731  # short
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen = train(run, model, optimizer, loss=loss, epochs=4, reduction="sum", scaler=scaler)
    return [*seen, *map(float, scaler.state_dict().values())]


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Muon": lambda p: torch.optim.Muon(p),
}


def with_optimizer(run: evenstep.Run, name: str) -> Seen:
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 12, bias=False), nn.ReLU(), nn.Linear(12, 4, bias=False))
    return train(run, model, OPTIMIZERS[name](model.parameters()), epochs=1)
