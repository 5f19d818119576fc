"""The way of a GPU, on the CPU: the same bits as the usual way, computed or replayed."""

import random
from functools import cache, partial
from textwrap import dedent

import pytest
import torch
from cases import CASES
from recorders import FakeRecorder

import evenstep
from evenstep.core.points import POINTS
from evenstep.engine import holdings, step
from evenstep.testing import Fault, plant
from evenstep.transport.memory import DeviceMemory
from workers import cli_run, run_workers


@pytest.fixture
def on_device(monkeypatch):
    """Lets runs have private memory and pieces, with a recorder that computes again at every replay."""

    def use():
        recorder = FakeRecorder()
        monkeypatch.setattr(holdings, "_memory_of", lambda device, segment: DeviceMemory(torch.device("cpu")))
        monkeypatch.setattr(step, "CudaRecorder", partial(_configured, recorder))
        return recorder

    return use


def _configured(recorder, device, *, overlap):
    recorder.overlap = overlap
    return recorder


def trained(case, **options):
    with evenstep.Run(shards=4, seed=3, quiet=True, **options) as run:
        return case(run), run.fingerprint()


@cache
def usual(case):
    """What a training ends on in the usual way."""
    assert holdings._memory_of.__module__ == holdings.__name__, "asked for before the other way is taken"
    return trained(case)


WAYS = {
    "computed": {"graphs": False},
    "replayed": {"graphs": "auto"},
    "two at a time": {"graphs": "auto", "overlap": True},
}


@pytest.mark.filterwarnings("ignore:steps are computed without CUDA graphs")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_kind_of_training_ends_on_the_same_bits(case, way, on_device):
    expected = usual(case)
    on_device()
    assert trained(case, **way) == expected


@pytest.mark.parametrize("recheck", [0, 2])
def test_two_shards_at_a_time_are_each_waited_for(recheck, on_device):
    def train(run):
        model = torch.nn.Linear(6, 3)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for n in range(12):
            inputs = torch.randn(14, 6, generator=torch.Generator().manual_seed(n))  # in parts of unlike sizes
            run.step(inputs, lambda part: model(part).square().mean())

    expected = trained(train)
    recorder = on_device()
    assert trained(train, overlap=True, recheck=recheck) == expected
    assert len(recorder.recorded) > 1
    assert recorder.num_joined > 30


@pytest.mark.filterwarnings("ignore:steps are computed without CUDA graphs")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_several_sites_end_on_the_same_bits(case, on_device):
    expected = usual(case)
    on_device()
    assert run_workers(3, lambda _: trained(case)) == [expected] * 3


TRAINING = """
    import torch, evenstep
    import torch.nn.functional as F
    from torch import nn

    with evenstep.Run(shards=4, graphs=False) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(10):
            inputs = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
            run.step((inputs, torch.arange(12) % 3), lambda part: F.cross_entropy(model(part[0]), part[1]))
            if step == 4:
                run.edit(lambda: [p.mul_(0.5) for p in model.parameters()])
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What the script prints in the usual way, on one worker, when nothing happens."""
    path = tmp_path_factory.mktemp("undisturbed") / "train.py"
    path.write_text(dedent(TRAINING))
    done = cli_run("run", "-n", "1", path)
    assert done.code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("point", ["forward", "before update", "inside update", "after update", "before commit"])
def test_a_site_that_is_lost_is_replaced_and_given_the_state(point, worker, script, tmp_path, on_device, undisturbed):
    on_device()
    faults = plant([Fault("kill", point, 6, worker=worker)], tmp_path / "faults")
    done = cli_run("run", "-n", "2", script(TRAINING), variables=faults)
    assert "was killed" in done.stderr
    assert done.stdout == undisturbed, done.stderr


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("point", ["forward", "before update", "after update", "inside commit", "after commit"])
def test_if_all_sites_are_lost_they_begin_from_the_image(point, num_workers, script, tmp_path, on_device, undisturbed):
    on_device()
    faults = plant([Fault("kill all", point, 2), Fault("kill all", point, 6)], tmp_path / "faults")
    done = cli_run("run", "-n", str(num_workers), script(TRAINING), variables=faults)
    assert "what they did last is done again" in done.stderr
    assert done.stdout == undisturbed, done.stderr


def test_without_images_it_is_said_that_all_were_lost(script, tmp_path, on_device):
    path = script(TRAINING.replace("graphs=False", "graphs=False, image=0"))
    on_device()
    faults = plant([Fault("kill all", "forward", 6)], tmp_path / "faults")
    done = cli_run("run", "-n", "2", path, variables=faults)
    assert done.code == 8
    assert "lost at once, and the state with them" in done.stderr
    assert "fingerprint" not in done.stdout


def test_sites_may_come_and_go(script, tmp_path, on_device, undisturbed):
    on_device()
    faults = [Fault("scale", "after commit", 3, worker=0, workers=3), Fault("scale", "after commit", 7, worker=0)]
    done = cli_run("run", "-n", "1", script(TRAINING), variables=plant(faults, tmp_path / "faults"))
    assert done.stdout == undisturbed, done.stderr


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_lost_whenever(seed, script, tmp_path, on_device, undisturbed):
    on_device()
    dice = random.Random(seed)
    faults = [
        Fault(dice.choice(["kill", "kill all"]), dice.choice(POINTS), dice.randint(1, 3), workers=dice.randint(1, 3))
        for _ in range(6)
    ]
    done = cli_run("run", "-n", "3", script(TRAINING), variables=plant(faults, tmp_path / "faults", in_order=True))
    assert done.stdout == undisturbed, done.stderr


def test_an_image_in_which_a_bit_has_flipped_is_said_and_not_used(script, tmp_path, on_device):
    on_device()
    faults = plant([Fault("kill all", "before update", 6), Fault("flip", "image", bit=1234)], tmp_path / "faults")
    done = cli_run("run", "-n", "2", script(TRAINING), variables=faults)
    assert (done.code, done.stdout) == (12, ""), done.stderr
    assert "the image of the state is not what was copied there, in or beside 'model.0.weight'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_parameter_that_changes_by_itself_on_the_only_gpu_is_taken_back_from_the_image(
    script, tmp_path, on_device, undisturbed
):
    on_device()
    faults = plant([Fault("flip", "parameter", 6 * 3 + 1, bit=70)], tmp_path / "faults")
    done = cli_run("run", "-n", "1", "--recheck", "1", script(TRAINING), variables=faults)
    assert done.stdout == undisturbed, done.stderr
    assert "at step 3 worker 0 (machine" in done.stderr
    assert "holds a wrong 'model.0.weight': element [0, 2] is" in done.stderr
    assert done.stderr.endswith("; it is taken back from the image on the host\n")
