"""What a step hands on to the next is that of plain torch, is committed with the step, and survives whoever dies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run, run_workers

WORDS = 11


class Language(nn.Module):
    """As the LSTM of a word language model."""

    def __init__(self, norm=False):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(WORDS, 6), nn.LSTM(6, 8, num_layers=2, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.out = nn.Linear(8, WORDS)

    def forward(self, x, state):
        found, state = self.lstm(self.embed(x), state)
        return self.out(self.norm(found.flatten(0, 1))), state


def first(rows):
    return (torch.zeros(2, rows, 8, dtype=torch.float64),) * 2


def pieces(rows=10, length=4, count=6):
    """A text in columns, cut into pieces that follow each other."""
    text = torch.randint(0, WORDS, (rows, length * count + 1), generator=torch.Generator().manual_seed(1))
    return [(text[:, n : n + length], text[:, n + 1 : n + length + 1]) for n in range(0, length * count, length)]


def loss_of(output, target):
    return F.cross_entropy(output, target.flatten())


def train(_=None, shards=4, *, norm=False, epochs=2):
    with evenstep.Run(shards=shards, seed=1, quiet=True) as run:
        model = Language(norm).double()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 1.0))
        hidden = run.carry(first)

        def function(part):
            output, state = model(part[0], hidden.get())
            hidden.set(state)
            return loss_of(output, part[1])

        losses = []
        for _ in range(epochs):
            hidden.reset()
            losses += [float(run.step(piece, function, clip_norm=0.25)) for piece in pieces()]
        return run.fingerprint(), losses


def plain(norm=False, epochs=2):
    torch.manual_seed(1)
    model = Language(norm).double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    losses = []
    for _ in range(epochs):
        state = first(10)
        for x, y in pieces():
            optimizer.zero_grad()
            output, state = model(x, tuple(t.detach() for t in state))
            loss = loss_of(output, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("norm", [False, True], ids=["alone", "side by side"])
@pytest.mark.parametrize("shards", [1, 4])
def test_truncated_backpropagation_is_that_of_plain_torch(shards, norm):
    torch.testing.assert_close(train(shards=shards, norm=norm)[1], plain(norm), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("norm", [False, True], ids=["alone", "side by side"])
def test_every_number_of_workers_ends_on_the_same_bits(norm):
    alone = train(norm=norm)
    for count in (2, 4):
        assert run_workers(count, lambda _: train(norm=norm)) == [alone] * count


def counting(run):
    """A model that does not matter, and a step that counts."""
    model = nn.Linear(2, 1)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
    return model, run.carry(lambda rows: {"count": torch.zeros(rows), "seen": [torch.zeros(rows, 3, dtype=torch.long)]})


def test_what_a_failed_step_has_set_is_not_seen():
    with evenstep.Run(shards=2, quiet=True) as run:
        model, carry = counting(run)
        seen = []

        def function(part, fail=False):
            value = carry.get()
            seen.append(value["count"].tolist())
            value["count"] += 1
            value["seen"][0] += 2
            carry.set(value)
            if fail:
                raise KeyError("planted")
            return model(part).mean()

        batch = torch.ones(4, 2)
        run.step(batch, function)
        before = run.fingerprint()
        with pytest.raises(KeyError):
            run.step(batch, lambda part: function(part, fail=True))
        assert run.fingerprint() == before
        run.step(batch, function)
        assert seen == [[0.0, 0.0]] * 2 + [[1.0, 1.0]] + [[1.0, 1.0]] * 2
        assert run.fingerprint() != before
        carry.reset()
        run.step(batch, function)
        assert seen[-2:] == [[0.0, 0.0]] * 2


def test_a_part_that_sets_nothing_keeps_what_it_has():
    with evenstep.Run(shards=2, quiet=True) as run:
        model, carry = counting(run)
        seen = []

        def function(part):
            value = carry.get()
            seen.append(float(value["count"][0]))
            if run.version != 1:
                carry.set({"count": value["count"] + 1, "seen": value["seen"]})
            return model(part).mean()

        for _ in range(4):
            run.step(torch.ones(4, 2), function)
        assert seen == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("stop", [1, 3])
def test_it_is_saved_and_loaded(tmp_path, stop):
    def run_it(load=False):
        with evenstep.Run(shards=2, quiet=True) as run:
            model, carry = counting(run)
            other = run.carry(lambda rows: torch.zeros(rows))
            if load:
                run.load(tmp_path)

            def function(part):
                value = carry.get()
                carry.set({"count": value["count"] + part[:, 0], "seen": [value["seen"][0] + 1]})
                other.set(other.get() - 1)
                return model(part).mean()

            while run.version < 5:
                run.step(torch.arange(8.0).reshape(4, 2), function)
                if run.version == stop and not load:
                    run.save(tmp_path)
            return run.fingerprint()

    whole = run_it()
    assert run_it(load=True) == whole


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (
            lambda run, carry: run.step(torch.ones(6, 2), carry.function),
            r"had float32 \(2,\), .* and now gets float32 \(3",
        ),
        (lambda run, carry: carry.get(), r"a carry was used outside a step function"),
        (lambda run, carry: carry.set(3), r"a carry was used outside a step function"),
        (lambda run, carry: run.step(torch.ones(4, 2), lambda part: carry.set("x")), r"passed to carry.set is a str"),
    ],
)
def test_mistakes_are_one_sentence(act, said):
    with evenstep.Run(shards=2, quiet=True) as run:
        model, carry = counting(run)

        def function(part):
            carry.set(carry.get() if run.version < 2 else carry._initial(len(part)))
            return model(part).mean()

        carry.function = function
        for _ in range(2):
            run.step(torch.ones(4, 2), function)
        with pytest.raises(evenstep.EvenstepError, match=said):
            act(run, carry)


SCRIPT = """
    import torch
    import evenstep

    with evenstep.Run(shards=4) as run:
        model = torch.nn.GRU(3, 5, batch_first=True)
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
        run.checkpoint(CHECKPOINTS, every=2)
        hidden = run.carry(lambda rows: torch.zeros(1, rows, 5))

        def function(part):
            output, state = model(part, hidden.get())
            hidden.set(state)
            return output.square().mean()

        for number in range(10):
            if number == 6:
                hidden.reset()
            run.step(torch.arange(132.0).reshape(11, 4, 3).add(number).sin(), function)
            if number == STOP:
                raise SystemExit(5)
"""


def test_it_survives_deaths_and_is_resumed(script, tmp_path):
    text = SCRIPT.replace("CHECKPOINTS", repr(str(tmp_path / "checkpoints")))
    undisturbed = cli_run("run", "-n", "1", script(text.replace("STOP", "99")))
    assert undisturbed.code == 0, undisturbed.stderr
    faults = [Fault("kill", "inside update", 3, worker=0), Fault("kill", "forward", 5, worker=1)]
    killed = cli_run("run", "-n", "3", script(text.replace("STOP", "99")), variables=plant(faults, tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0, 1]
    assert killed.stdout == undisturbed.stdout
    assert cli_run("run", "-n", "2", "--max-restarts", "0", script(text.replace("STOP", "5"))).code == 5
    resumed = cli_run("run", "-n", "3", "--resume", script(text.replace("STOP", "99")))
    assert resumed.stdout == undisturbed.stdout, resumed.stderr
