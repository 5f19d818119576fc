"""On a GPU: graphs, workers and deaths change no bit. Needs CUDA; `make test-gpu` runs it.

Workers of one GPU stand in for several GPUs: each is a site with memory of its own.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from cases import CASES
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.testing import Fault, plant
from workers import script_run

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as a run would: it stays, for cuBLAS reads it once
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def trained(case, **options):
    with evenstep.Run(shards=4, seed=3, quiet=True, device="cuda", **options) as run:
        return case(run), run.fingerprint()


ON_THE_HOST = ("a_gan", "a_contrastive_loss_over_the_whole_batch")  # these make tensors there


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [case for case in CASES if case not in ON_THE_HOST])
def test_graphs_change_no_bit(case):
    expected = trained(CASES[case], graphs=False)
    assert trained(CASES[case], graphs="auto") == expected
    assert trained(CASES[case], graphs="auto", overlap=True) == expected


class Net(nn.Module):
    """A little of everything that people use on GPUs."""

    def __init__(self, *, norm=True, checkpointed=False):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16) if norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))
        self.head, self.checkpointed = nn.Linear(16, 10), checkpointed

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        x = x + (checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x))
        return self.head(x)


def train(run, model, make, *, amp=None, steps=8, **options):
    model = model.to(memory_format=torch.channels_last)
    model, _ = run.prepare(model, make(model.parameters()))

    def loss(part):
        with torch.autocast("cuda", amp or torch.float32, enabled=amp is not None):
            return F.cross_entropy(model(part[0]), part[1])

    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(24, 3, 8, 8, generator=generator), torch.randint(0, 10, (24,), generator=generator)
        run.step(batch, loss, **options)
    return run.fingerprint()


KINDS = {
    "fp32, AdamW": (lambda: Net(), lambda p: torch.optim.AdamW(p, 1e-2), {}),
    "bf16, fused": (lambda: Net(), lambda p: torch.optim.AdamW(p, 1e-2, fused=True), {"amp": torch.bfloat16}),
    "bf16, foreach": (
        lambda: Net(norm=False),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
        {"amp": torch.bfloat16},
    ),
    "clipped": (lambda: Net(), lambda p: torch.optim.SGD(p, 0.1), {"clip_norm": 0.1}),
    "checkpointed": (lambda: Net(norm=False, checkpointed=True), lambda p: torch.optim.Adam(p, 1e-2), {}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_what_people_use_gives_one_result_with_graphs_and_without(kind):
    build, make, options = KINDS[kind]
    found = set()
    for graphs, overlap in (("auto", False), ("auto", True), (False, False)):
        with evenstep.Run(shards=4, device="cuda", quiet=True, graphs=graphs, overlap=overlap) as run:
            found.add(train(run, build(), make, **options))
    assert len(found) == 1


def test_what_a_graph_would_read_from_the_host_is_not_captured():
    def train(graphs):
        with evenstep.Run(shards=2, device="cuda", quiet=True, graphs=graphs) as run:
            model = nn.Linear(4, 1)
            model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for step in range(8):

                def loss(part):
                    weights = torch.tensor([1.0, 2.0, 3.0, 4.0]).to("cuda", non_blocking=True)
                    return model(part * weights).square().mean()

                run.step(torch.full((4, 4), 0.1 * step), loss)
            return run.fingerprint()

    with pytest.warns(UserWarning, match="without CUDA graphs"):
        found = train("auto")
    assert found == train(False)


def train_scaled(graphs):
    with evenstep.Run(shards=4, device="cuda", quiet=True, graphs=graphs) as run:
        model = Net(norm=False)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**18, growth_interval=3)
        scales = []

        def loss(part):
            with torch.autocast("cuda", torch.float16):
                return F.cross_entropy(model(part[0]), part[1])

        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(24, 3, 8, 8, generator=generator), torch.randint(0, 10, (24,), generator=generator)
            run.step(batch, loss, scaler=scaler)
            scales.append(scaler.get_scale())
        return run.fingerprint(), scales


@pytest.mark.filterwarnings("ignore")
def test_a_scaler_skips_and_grows_alike_with_graphs_and_without():
    found, scales = train_scaled("auto")
    assert (found, scales) == train_scaled(False)
    assert len(set(scales)) > 1


def train_averaged(run):
    model, average = Net(norm=False), Net(norm=False)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    average = run.prepare(average)
    pairs = list(zip(average.parameters(), model.parameters(), strict=True))
    for step in range(6):
        batch = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(step)), torch.arange(8)
        run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
        run.edit(lambda: [a.lerp_(p, 0.1) for a, p in pairs])


def test_averages_of_weights_give_one_result_with_graphs_and_without():
    found = set()
    for graphs in ("auto", False):
        with evenstep.Run(shards=2, device="cuda", quiet=True, graphs=graphs) as run:
            train_averaged(run)
            found.add(run.fingerprint())
    assert len(found) == 1


def train_on(data, loaders):
    with evenstep.Run(shards=4, device="cuda", quiet=True) as run:
        model = Net()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for batch in run.batches(data, 24, epochs=2, loaders=loaders):
            run.step(batch, lambda part: F.cross_entropy(model(part[0]), part[1]))
        return run.fingerprint()


def test_batches_are_sent_ahead_and_change_no_bit():
    data = torch.utils.data.TensorDataset(torch.randn(96, 3, 8, 8), torch.arange(96) % 10)
    assert train_on(data, 0) == train_on(data, 2)


SCRIPT = """
    import sys, torch, evenstep
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            norm = nn.BatchNorm2d(16) if "norm" in sys.argv else nn.Identity()
            self.a, self.norm, self.drop, self.b = nn.Conv2d(3, 16, 3), norm, nn.Dropout(0.1), nn.Linear(16, 10)

        def body(self, x):
            return self.drop(F.relu(self.norm(self.a(x))).mean((2, 3)))

        def forward(self, x):
            return self.b(checkpoint(self.body, x, use_reentrant=False) if "checkpointed" in sys.argv else self.body(x))

    with evenstep.Run(shards=4, device="cuda", graphs=False if "eager" in sys.argv else "auto") as run:
        model = Net()
        if "channels_last" in sys.argv:
            model = model.to(memory_format=torch.channels_last)
        chosen = {name: True for name in ("fused", "foreach") if name in sys.argv}
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2, **chosen))
        called = torch.compile(model) if "compiled" in sys.argv else model
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=3) if "scaled" in sys.argv else None
        run.checkpoint("checkpoints", every=5)
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(24, 3, 8, 8, generator=generator), torch.randint(0, 10, (24,), generator=generator)
            with torch.autocast("cuda", torch.float16 if scaler else torch.bfloat16):
                loss = lambda part: F.cross_entropy(called(part[0]), part[1])
                run.step(batch, loss, clip_norm=1.0, scaler=scaler)
            if step == 6:
                run.edit(lambda: [p.mul_(0.5) for p in model.parameters()])
        if scaler:
            run.print(f"scale {scaler.get_scale()}")
"""


@pytest.mark.parametrize("kind", ["scaled", "fused", "foreach", "checkpointed", "channels_last"])
def test_what_people_use_gives_one_result_on_one_worker_and_two(kind, script, tmp_path):
    path, results = script(SCRIPT), set()
    for options in (("-n", "1", path), ("-n", "2", path), ("-n", "2", path, "eager")):
        done = script_run(*options, kind, "norm", cwd=tmp_path, timeout_s=100)
        assert done.code == 0, done.stderr
        results.add(done.stdout)
    assert len(results) == 1, results


@pytest.mark.parametrize("norm", ["norm", "plain"])
def test_several_workers_and_their_deaths_change_no_bit(norm, script, tmp_path):
    path = script(SCRIPT)
    quiet = script_run("-n", "1", path, norm, cwd=tmp_path, timeout_s=100)
    assert quiet.code == 0, quiet.stderr
    results = {"one worker": quiet.stdout}
    results["two workers"] = script_run("-n", "2", path, norm, cwd=tmp_path, timeout_s=100).stdout
    for worker, point in ((1, "forward"), (0, "inside update"), (1, "before commit")):
        faults = plant([Fault("kill", point, 8, worker=worker)], tmp_path / f"{worker}{point}")
        done = script_run("-n", "2", path, norm, cwd=tmp_path, timeout_s=100, variables=faults)
        assert "was killed" in done.stderr
        results[f"{worker} {point}"] = done.stdout
    assert set(results.values()) == {quiet.stdout}, results


def test_a_compiled_model_gives_one_result_on_any_workers_with_graphs_and_without(script, tmp_path):
    path, results = script(SCRIPT), {}
    for options in (("-n", "1", path), ("-n", "2", path), ("-n", "2", path, "eager")):
        done = script_run(*options, "compiled", cwd=tmp_path, timeout_s=200)
        assert done.code == 0, done.stderr
        results[options] = done.stdout
    assert len(set(results.values())) == 1, results


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("point", ["forward", "after update", "inside commit"])
def test_all_workers_may_be_lost(point, num_workers, script, tmp_path):
    path = script(SCRIPT)
    expected = script_run("-n", "1", path, "plain", cwd=tmp_path, timeout_s=100).stdout
    faults = plant([Fault("kill all", point, 8)], tmp_path / "faults")
    done = script_run("-n", str(num_workers), path, "plain", cwd=tmp_path, timeout_s=100, variables=faults)
    assert "what they did last is done again" in done.stderr, done.stderr
    assert done.stdout == expected


def test_a_run_that_was_lost_goes_on_from_its_checkpoint_on_another_number_of_workers(script, tmp_path):
    path = script(SCRIPT.replace('device="cuda"', 'device="cuda", image=0'))
    expected = script_run("-n", "1", path, "plain", cwd=tmp_path / "..", timeout_s=100).stdout
    faults = plant([Fault("kill all", "forward", 8)], tmp_path / "faults")
    lost = script_run("-n", "2", path, "plain", cwd=tmp_path, timeout_s=100, variables=faults)
    assert "lost at once" in lost.stderr
    assert script_run("--resume", "-n", "3", path, "plain", cwd=tmp_path, timeout_s=100).stdout == expected
