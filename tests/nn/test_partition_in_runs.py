"""Layers cut by features in a run: the same bits on every number of workers, whoever computes which part."""

import gc
import re
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # torch's own name for it
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import evenstep
from evenstep.core.errors import UnsupportedError
from evenstep.nn import Partitioned, partition
from evenstep.server import ParameterServer
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import WorkersFailed, cli_run, run_workers

MARKS = {
    "embed": "feature",
    "rows": "input-feature",
    "conv": "feature",
    "across": "input-feature",
    "mlp": "feature",
    "out": "feature",
}


class Net(nn.Module):
    """Every kind of layer and cut, with batch norm, dropout and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.rows = nn.Embedding(11, 10, padding_idx=2), nn.Embedding(11, 10)
        self.conv, self.norm = nn.Conv1d(10, 7, 3, padding=1), nn.BatchNorm1d(7)
        self.across, self.drop = nn.Linear(49, 9), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(9, 13, bias=False), nn.GELU(), nn.Linear(13, 9))
        self.out = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv((self.embed(x) + self.rows(x)).mT)))
        x = self.drop(torch.tanh(self.across(x.flatten(1))))
        return self.out(self.mlp(x + self.mlp(x)))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randint(0, 11, (43, 7), generator=generator), torch.randint(0, 5, (43,), generator=generator)
    )


def loss_of(model: nn.Module, part: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(part[0]).float(), part[1])


def train(run, model, optimizer=None, loss=loss_of, epochs=1):
    """Every number that a user would see. Shards are uneven; the last step has none for the last of four workers."""
    model, optimizer = run.prepare(model, optimizer or torch.optim.AdamW(model.parameters(), 1e-2))
    batches = run.batches(data(), batch_size=19, epochs=epochs)
    seen = [float(run.step(batch, lambda part: loss(model, part), clip_norm=1.0)) for batch in batches]
    return [*seen, run.evaluate(data(), 20, lambda part: {"loss": loss(model.eval(), part)})["loss"]]


def parted(run):
    model = partition(Net(), MARKS, parts=3)
    return train(run, model)


def in_bfloat16(run):
    return train(run, partition(Net(), MARKS, parts=5).bfloat16())


def under_autocast(run):
    def loss(model, part):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, part)

    return train(run, partition(Net(), MARKS, parts=3), loss=loss)


def partly_frozen(run):
    model = partition(Net(), MARKS, parts=3)
    for module in (model.embed, model.conv.parts[1], model.mlp):
        module.requires_grad_(False)
    return train(run, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))


def all_frozen_but_the_first(run):
    model = partition(Net(), MARKS, parts=3)
    return train(run, model, torch.optim.SGD(model.embed.parameters(), 0.1))


def tied(run):
    model = Net()
    model.out = nn.Linear(9, 11, bias=False)
    model.embed, model.conv = nn.Embedding(11, 9), nn.Conv1d(9, 7, 3, padding=1)
    model.rows = nn.Embedding(11, 9)
    model.out.weight = model.embed.weight
    return train(run, partition(model, {**MARKS, "embed": "input-feature"}, parts=3))


def used_by_some_shards_only(run):
    def loss(model, part):
        ignored = part[1].sum() % 2 == 0
        return (
            model(part[0]).mean() * 0.5
            if not ignored
            else (model(part[0]).detach() * model.out.parts[0].bias.sum()).mean()
        )

    return train(run, partition(Net(), MARKS, parts=3), loss=loss)


def result(function):
    with evenstep.Run(shards=6, seed=3, quiet=True) as run:
        seen = function(run)
        return run.fingerprint(), seen


@pytest.mark.parametrize(
    "function",
    [
        parted,
        in_bfloat16,
        under_autocast,
        partly_frozen,
        all_frozen_but_the_first,
        tied,
        used_by_some_shards_only,
    ],
)
def test_every_number_of_workers_ends_on_the_same_bits(function):
    alone = result(function)
    assert all(number == number for number in alone[1]), "a loss is not a number"
    for count in (2, 3, 4) if function is parted else (3,):  # more workers than parts, too
        for worker, found in enumerate(run_workers(count, lambda _: result(function))):
            assert found == alone, f"worker {worker} of {count}"


def test_it_trains_as_the_unpartitioned_model_does():
    def result(marks):
        with evenstep.Run(shards=6, seed=3, quiet=True) as run:
            model = partition(Net(), marks, parts=3)
            return train(run, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)), model.state_dict()

    (expected, whole), (found, parted) = result({"*": "batch"}), result(MARKS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert list(parted) == list(whole)
    for name, value in whole.items():
        torch.testing.assert_close(parted[name], value, rtol=1e-4, atol=1e-5)


def test_every_worker_computes_its_own_parts_only_for_all_shards_and_has_their_gradients_only():
    def body(_worker):
        with evenstep.Run(shards=6, quiet=True) as run:
            model = partition(nn.Linear(4, 10), "feature", parts=5)
            calls = [0] * 5
            for p, part in enumerate(model.parts):
                part.register_forward_hook(lambda *_, p=p: calls.__setitem__(p, calls[p] + 1))
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            found, gradients = [], run._engine.optimizers[0].gradients
            arrive = gradients.arrive
            gradients.arrive = lambda i, *rest: (found.append(i // 2), arrive(i, *rest))  # a weight and a bias each
            run.step(torch.ones(12, 4), lambda part: model(part).square().mean())
            return calls, sorted(found)

    assert run_workers(2, body) == [([6, 6, 6, 0, 0], [0, 0, 1, 1, 2, 2]), ([0, 0, 0, 6, 6], [3, 3, 4, 4])]


def test_a_checkpoint_goes_on_with_another_number_of_workers(tmp_path):
    def body(steps, save=False, load=False):
        with evenstep.Run(shards=6, seed=3, quiet=True) as run:
            model = partition(Net(), MARKS, parts=3)
            model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
            if load:
                run.load(tmp_path / "saved")
            for number, batch in enumerate(run.batches(data(), batch_size=19, epochs=2)):
                run.step(batch, lambda part: loss_of(model, part))
                if number + 1 == steps:
                    break
            if save:
                run.save(tmp_path / "saved")
            return run.fingerprint()

    run_workers(3, lambda _: body(2, save=True))
    assert run_workers(2, lambda _: body(3, load=True)) == [body(5)] * 2


SCRIPT = """
    import torch
    from torch import nn
    import evenstep
    from evenstep.nn import partition

    with evenstep.Run(shards=4, seed=3) as run:
        model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3))
        partition(model, {"0": "feature", "2": "input-feature", "4": "feature"}, parts=3)
        model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), 1e-2))
        data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
        for batch in run.batches(data, batch_size=12, epochs=1):
            run.step(batch, lambda part: nn.functional.cross_entropy(model(part[0]), part[1]))
"""


def fingerprint(said: str) -> str:
    return re.search("fingerprint ([0-9a-f]{64})", said)[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("undisturbed") / "train.py"
    path.write_text(dedent(SCRIPT))
    return fingerprint(cli_run("run", "-n", "1", path).stdout)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", "exchange", visit=30, worker=1),  # in a forward
        Fault("kill", "exchange", visit=45, worker=0),
        Fault("kill", "backward", visit=3, worker=2),
    ],
    ids=lambda fault: f"{fault.point} of {fault.worker}",
)
def test_a_worker_that_dies_among_the_parts_changes_nothing(script, tmp_path, undisturbed, fault):
    done = cli_run("run", "-n", "3", script(SCRIPT), variables=plant([fault], tmp_path / "faults"))
    assert done.code == 0, done.stderr
    assert struck(tmp_path / "faults") == [0]
    assert fingerprint(done.stdout) == undisturbed


def test_activation_checkpointing_is_refused():
    def body(_worker):
        with evenstep.Run(shards=2, quiet=True) as run:
            model = partition(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), {"0": "feature"}, parts=2)
            run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            run.step(torch.ones(4, 4), lambda part: checkpoint(model, part, use_reentrant=False).sum())

    with pytest.raises(WorkersFailed, match="'0' is partitioned by features and computed again in backward"):
        run_workers(1, body)


def test_a_step_that_fails_after_a_partitioned_layer_leaves_nothing_behind():
    def fail(part):
        output = model(part)
        raise ValueError(f"after {tuple(output.shape)}")

    with evenstep.Run(shards=2, quiet=True) as run:
        model = partition(nn.Linear(4, 4), "feature", parts=2)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(ValueError, match="after"):
            run.step(torch.ones(4, 4), fail)
    gc.collect()  # what it frees frees more, which a second pass finds


def test_shards_that_reach_different_layers_get_an_error_that_names_both():
    def body(worker):
        with evenstep.Run(shards=2, quiet=True) as run:
            model = partition(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"*": "feature"}, parts=2)
            run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            run.step(torch.ones(4, 4), lambda part: model[worker](part).sum())

    with pytest.raises(WorkersFailed) as caught:
        run_workers(2, body)
    assert "'step 0: 0 call 0 inputs (sizes)'" in str(caught.value)
    assert "'step 0: 1 call 0 inputs (sizes)'" in str(caught.value)


def test_evaluation_and_prediction_give_what_the_layer_gives_alone():
    def body(_worker):
        with evenstep.Run(shards=4, seed=1, quiet=True) as run:
            model = partition(nn.Linear(4, 10), "input-feature", parts=3)
            run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            inputs = torch.randn(10, 4)
            outputs = run.predict(TensorDataset(inputs), 8, lambda part: model(part[0]))
        torch.testing.assert_close(outputs, model.eval()(inputs).detach())
        assert isinstance(model, Partitioned)
        return outputs.numpy().tobytes()

    found = run_workers(3, body)
    assert found == [body(0)] * 3


def test_the_example_says_what_it_promises():
    path = Path(__file__).parents[2] / "examples" / "partition.py"
    one, three = (cli_run("run", "-n", count, path, variables={"EVENSTEP_MAX_STEPS": "2"}) for count in "13")
    assert (one.code, three.code) == (0, 0), one.stderr + three.stderr
    assert fingerprint(one.stdout) == fingerprint(three.stdout)
    assert (
        "in a checkpoint: embed.weight, mlp.0.weight, mlp.0.bias, mlp.2.weight, mlp.2.bias, head.weight, head"
        in one.stdout
    )


def test_workers_that_meet_only_at_a_server_cannot_share_a_layer(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(4, 4)
    with (
        ParameterServer(model, lambda p: torch.optim.SGD(p, 0.1), staleness=None, transports=("tcp",)) as server,
        evenstep.Run(server=evenstep.Server(server.url, staleness=None), quiet=True) as run,
    ):
        parted = partition(nn.Linear(4, 4), "feature", parts=2)
        with pytest.raises(UnsupportedError, match="a layer that is partitioned by features spans the shards of all"):
            run.prepare(parted, torch.optim.SGD(parted.parameters(), 0.1))
