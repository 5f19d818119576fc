"""The way of a GPU, on the CPU: the same bits as the usual way, computed or replayed."""

import pytest
import torch
from cases import CASES
from recorders import FakeRecorder

import evenstep
from evenstep.engine import holdings, step
from evenstep.transport.memory import DeviceMemory
from workers import run_workers


@pytest.fixture
def on_device(monkeypatch):
    """Lets runs have private memory and pieces, with a recorder that computes again at every replay."""

    def use():
        monkeypatch.setattr(holdings, "_memory_of", lambda device, segment: DeviceMemory(torch.device("cpu")))
        monkeypatch.setattr(step, "CudaRecorder", lambda device: recorder)
        return recorder

    recorder = FakeRecorder()
    return use


def trained(case, **options):
    with evenstep.Run(shards=4, seed=3, quiet=True, **options) as run:
        return case(run), run.fingerprint()


@pytest.mark.filterwarnings("ignore:steps are computed without CUDA graphs")
@pytest.mark.parametrize("graphs", [False, "auto"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_kind_of_training_ends_on_the_same_bits(case, graphs, on_device):
    expected = trained(case)
    recorder = on_device()
    assert trained(case, graphs=graphs) == expected
    recorder.recorded.clear()


@pytest.mark.filterwarnings("ignore:steps are computed without CUDA graphs")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_several_sites_end_on_the_same_bits(case, on_device):
    expected = trained(case)
    on_device()
    assert run_workers(3, lambda _: trained(case)) == [expected] * 3
