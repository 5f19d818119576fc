"""One fingerprint for one machine, for two, for four: everything that a run can do, over several machines."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
import processes
from bridged_machines import counters, run_machine_outcomes, run_machines
from evenstep.exchange.generations import Generation
from workers import run_workers

DATA = torch.utils.data.TensorDataset(
    torch.randn(70, 6, generator=torch.Generator().manual_seed(1)),
    torch.randint(0, 3, (70,), generator=torch.Generator().manual_seed(2)),
)
MACHINES = [[1, 1], [2, 1], [1, 2, 1]]


class Counting(nn.Module):
    """Keeps buffers that a forward changes: one alike in all shards, one that is not, and an integer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.last.copy_(x.detach()[0, :3])
        self.calls += 1
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), Counting())
        self.wide = nn.Linear(64, 9000)  # 2.3 MB: several pieces
        self.out = nn.Linear(9000, 3)
        self.sometimes = nn.Linear(3, 3)
        self.never = nn.Parameter(torch.ones(5))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x, uses):
        x = self.out(F.relu(self.wide(self.layers(self.frozen(x)))))
        return self.sometimes(x) if uses else x


def train(run, epochs=1, **options):
    model = Net()
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    losses = []
    for batch in run.batches(DATA, batch_size=18, epochs=epochs):  # the last has 16; an epoch of 4 steps

        def function(part):
            uses = bool(run.version % 2 and float(part[0][0, 0]) > 0)  # in some shards of some steps
            return F.cross_entropy(model(part[0], uses), part[1]), {"rows": float(len(part[1]))}

        losses.append(run.step(batch, function, **options))
        scheduler.step()
    return model, optimizer, [(float(loss), metrics) for loss, metrics in losses]


def everything(worker):
    """What a script may do, and what it sees of it."""
    del worker
    with evenstep.Run(shards=8, seed=5, quiet=True, timeout_s=30.0) as run:
        model, _, losses = train(run, clip_norm=1.0)
        seen = [run.fingerprint(), losses]
        run.edit(lambda: [p.mul_(0.5) for p in model.parameters()] and None)
        seen.append(run.fingerprint())
        seen.append(run.evaluate(DATA, 20, lambda part: {"loss": F.cross_entropy(model(part[0], False), part[1])}))
        seen.append(float(run.predict(DATA, 20, lambda part: model(part[0], False)).double().sum()))
        seen.append(float(run.exchange("mine", lambda shard: torch.full((5,), float(shard))).sum()))
        memory = run.carry(lambda rows: torch.zeros(rows, 2))
        for batch in run.batches(DATA, batch_size=16, drop_last=True):

            def remembering(part):
                before = memory.get()
                memory.set(before + part[0][:, :2])
                return F.cross_entropy(model(part[0] + before.sum(), False), part[1])

            run.step(batch, remembering)
        seen.append(run.fingerprint())
        few = torch.utils.data.TensorDataset(*(t[:3] for t in DATA.tensors))  # three samples for eight shards
        second, adam = nn.Linear(6, 3), None
        second, adam = run.prepare(second, torch.optim.AdamW(second.parameters(), 1e-2))
        for batch in run.batches(few, batch_size=3, epochs=3):
            run.step(batch, lambda part: F.cross_entropy(second(part[0]), part[1]), adam)
        seen.append(run.fingerprint())
        return seen


@pytest.fixture(scope="module")
def on_one_machine():
    return run_workers(1, everything)[0]


@pytest.mark.parametrize("counts", MACHINES, ids=str)
def test_bridged_machines_end_on_the_bits_of_one(counts, on_one_machine):
    for seen in run_machines(counts, everything):
        assert seen == on_one_machine


def test_machines_that_have_more_shards_than_one_node_end_on_the_same_bits(on_one_machine):
    def body(worker):
        import evenstep.plan.machines

        evenstep.plan.machines._nodes = lambda size, machines: None  # 3 + 3 + 2, of which two are two nodes each
        return everything(worker)

    for seen in run_machines([1, 1, 1], body):
        assert seen == on_one_machine


def keeping(worker, body):
    """Let the first worker keep the state and compute nothing."""
    import evenstep.exchange.membership

    evenstep.exchange.membership.Generation = partial(Generation, keeper=True)
    return body(worker)


def test_a_keeper_computes_no_shard_and_ends_on_the_same_bits(on_one_machine):
    for seen in run_machines([1, 1, 2], partial(keeping, body=everything)):
        assert seen == on_one_machine


def test_a_keeper_is_no_worker_that_a_script_counts_and_computes_only_to_check_others():
    def body(worker):
        with evenstep.Run(shards=8, seed=5, quiet=True, timeout_s=30.0, recheck=2) as run:
            train(run, epochs=1)
            return run.fingerprint(), run.num_workers, len(run.local_shards)

    alone = run_workers(1, body)[0][0]
    assert run_machines([1, 1, 1], partial(keeping, body=body)) == [(alone, 2, 0), (alone, 2, 4), (alone, 2, 4)]


def test_a_checkpoint_is_read_and_written_on_the_first_machine_only(tmp_path):
    def body(worker):
        with evenstep.Run(shards=8, seed=5, quiet=True, timeout_s=30.0) as run:
            model, optimizer, _ = train(run, epochs=1)
            before = run.fingerprint()
            folder = tmp_path / "elsewhere" if worker == 1 else tmp_path  # on its machine there is no such folder
            run.save(folder / "checkpoint")
            run.edit(lambda: [p.zero_() for p in model.parameters()] and None)
            assert run.fingerprint() != before
            run.load(folder / "checkpoint")
            assert run.fingerprint() == before
            for batch in run.batches(DATA, batch_size=18):
                run.step(batch, lambda part: F.cross_entropy(model(part[0], False), part[1]), optimizer)
            return run.fingerprint()

    (alone,) = run_workers(1, body)
    assert run_machines([1, 1], body) == [alone] * 2
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_on_one_machine_reaches_the_others_at_once():
    def body(worker):
        with evenstep.Run(shards=4, quiet=True, timeout_s=30.0) as run:
            model = nn.Linear(6, 3)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for batch in run.batches(DATA, batch_size=20):
                if worker == 1 and run.version == 1:
                    raise ValueError("a bad day")
                run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))

    first, second, third = run_machine_outcomes([1, 1, 1], body)
    assert second.kind == "ValueError"
    for other in (first, third):
        assert other.kind == "PeerError", "and not the silence of somebody"
        assert "worker 1 failed" in other.text
        assert "ValueError: a bad day" in other.text


def test_a_worker_that_says_nothing_is_named_with_its_machine(tmp_path):
    def body(worker):
        with evenstep.Run(shards=4, quiet=True, timeout_s=30.0) as run:
            if worker == 1:
                assert processes.until((tmp_path / "given up").exists)
            run._engine.group.timeout_s = 1.0
            try:
                run.exchange("late", lambda shard: torch.ones(2))
            finally:
                (tmp_path / "given up").touch()

    first, _ = run_machine_outcomes([1, 1], body)
    assert first.kind == "SilenceError"
    assert "worker 1 (on machine 1) said nothing for 1 s" in first.text


def test_workers_of_two_machines_at_different_layers_get_an_error_that_names_both():
    def body(worker):
        with evenstep.Run(shards=4, quiet=True, timeout_s=10.0) as run:
            run.exchange(["this", "that"][worker], lambda shard: torch.ones(2))

    outcomes = run_machine_outcomes([1, 1], body)
    assert {outcome.kind for outcome in outcomes} <= {"MismatchError", "PeerError"}
    assert any("this" in o.text and "that" in o.text and "worker 0 is at" in o.text for o in outcomes), outcomes


def test_what_bridged_machines_cannot_do_is_refused():
    def body(_):
        evenstep.Run(shards=4, quiet=True, timeout_s=10.0, server=evenstep.Server("tcp://127.0.0.1:1", aggregate=True))

    for outcome in run_machine_outcomes([1, 1], body):
        assert outcome.kind == "UnsupportedError"
        assert "start each machine's workers by themselves" in outcome.text


def words_of_a_step(layers, counts):
    """How many messages the first machine sends in a step of a model with so many batch norms."""
    words = counters(len(counts))

    def body(_):
        with evenstep.Run(shards=8, seed=3) as run:
            model = nn.Sequential(*(nn.BatchNorm1d(6) for _ in range(layers)), nn.Linear(6, 3))
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            seen = []
            for batch in run.batches(DATA, batch_size=14, epochs=3):  # every shard has samples in every step
                run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
                seen.append(int(words[0]))
            return seen

    seen = run_machines(counts, body, words=words)[0]
    return round((seen[-1] - seen[1]) / (len(seen) - 2))  # the last message of a step may be counted in the next


@pytest.mark.parametrize("counts", [[1, 1], [3, 1]])
def test_a_batch_norm_is_one_message_each_way_whatever_the_number_of_workers(counts):
    one = words_of_a_step(1, counts)
    assert one == 2 + 2, "that of one, the results, and that all have updated"
    assert words_of_a_step(3, counts) - one == 2 * 2
