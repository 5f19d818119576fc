"""What people train with runs on the backend as it is, and ends on the bits that it ends on with gloo."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # torch's own name for it
from torch.nn.parallel import DistributedDataParallel

with warnings.catch_warnings(action="ignore"):  # it scripts functions, which torch has deprecated
    from torch.distributed.optim import ZeroRedundancyOptimizer

NUM_RANKS = 2
State = dict[str, bytes]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 5))


def batches(rank: int, num_batches: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(8, 20, generator=generator), torch.randint(0, 5, (8,), generator=generator))
        for _ in range(num_batches)
    ]


def train(network: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for inputs, targets in data:
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimizer.step()


def state_of(network: nn.Module) -> State:
    tensors = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in network.state_dict().items()}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def ddp(rank: int, _: Path) -> State:
    network = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    train(network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), batches(rank))
    return state_of(network.module)


def ddp_with_half_precision_gradients(rank: int, _: Path) -> State:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    network = DistributedDataParallel(model(), static_graph=True)
    network.register_comm_hook(None, fp16_compress_hook)
    train(network, torch.optim.SGD(network.parameters(), lr=0.1), batches(rank))
    return state_of(network.module)


def join(rank: int, _: Path) -> State:
    network = DistributedDataParallel(model())
    with network.join():
        train(network, torch.optim.SGD(network.parameters(), lr=0.1), batches(rank, 3 + 2 * rank))
    return state_of(network.module)


def zero(rank: int, _: Path) -> State:
    network = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(network.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    train(network, optimizer, batches(rank))
    optimizer.consolidate_state_dict(to=0)
    return state_of(network.module)


def sharded() -> nn.Module:
    network = model()
    for layer in network:
        fully_shard(layer)
    return fully_shard(network)


def fsdp(rank: int, _: Path) -> State:
    network = sharded()
    train(network, torch.optim.Adam(network.parameters(), lr=0.01), batches(rank))
    return state_of(network)


def checkpoint(rank: int, folder: Path) -> State:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    network = sharded()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    train(network, optimizer, batches(rank)[:2])
    weights, moments = get_state_dict(network, optimizer)
    dcp.save({"weights": weights, "moments": moments}, checkpoint_id=folder)
    train(network, optimizer, batches(rank)[2:])  # is lost
    again = sharded()
    fresh = torch.optim.Adam(again.parameters(), lr=0.01)
    weights, moments = get_state_dict(again, fresh)
    dcp.load({"weights": weights, "moments": moments}, checkpoint_id=folder)
    set_state_dict(again, fresh, model_state_dict=weights, optim_state_dict=moments)
    train(again, fresh, batches(rank)[2:])
    expected, found = state_of(network), state_of(again)
    assert all(found[name] == expected[name] for name, _ in network.named_parameters())
    return found


def accelerate(rank: int, _: Path) -> State:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # of tests that ran in this process before
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == NUM_RANKS
    data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches(0), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    losses = accelerator.gather(loss.detach().view(1))
    return {**state_of(accelerator.unwrap_model(network)), "losses": losses.numpy().tobytes()}


@pytest.mark.parametrize("trained", [ddp, ddp_with_half_precision_gradients, join, zero, fsdp, checkpoint, accelerate])
def test_it_ends_where_it_ends_with_gloo(trained: Callable[[int, Path], State], tmp_path):
    def body(rank):
        warnings.simplefilter("ignore")  # theirs, about names and settings of torch
        return trained(rank, tmp_path / dist.get_backend())

    ours, theirs = (run_ranks(NUM_RANKS, body, backend=backend) for backend in ("evenstep", "gloo"))
    assert ours == theirs


def test_synchronized_batch_norm_of_ours_spans_the_group():
    def body(rank):
        from evenstep.nn import convert_sync_batchnorm

        network = DistributedDataParallel(convert_sync_batchnorm(model()))
        train(network, torch.optim.SGD(network.parameters(), lr=0.1), batches(rank))
        return state_of(network.module)

    ours, theirs = (run_ranks(NUM_RANKS, body, backend=backend) for backend in ("evenstep", "gloo"))
    assert ours == theirs
