"""Data parallelism in one process: replicas of a module on several devices, each with a part of the batch.

`DataParallel` works on any devices, several replicas on one CPU included. Its replicas are the participants of one
session, so synchronized batch norm spans them, and a replica that fails ends the forward for all at once.

A module may define ``__data_parallel_replicate__(context, replica_number)``. It is called on every replica of the
module after replication, with one `ReplicationContext` that all copies of that module share in this forward; replica
0's is called first. `add_replication_callbacks` gives both, callbacks and the session, to an existing
`torch.nn.DataParallel`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.exchange.rendezvous import Lead, Participant, ParticipantError, Rendezvous
from evenstep.exchange.surroundings import inside
from evenstep.exchange.threads import Threads, side_by_side
from evenstep.nn.scatter import gather, num_parts, scatter
from evenstep.nn.tokenless import Tokenless

__all__ = ["DataParallel", "ReplicationContext", "add_replication_callbacks", "remove_replication_callbacks"]

D = TypeVar("D", bound=nn.DataParallel[Any])


class ReplicationContext:
    """Shared by all copies of one module in one forward; modules may put what they like on it.

    Attributes:
        num_replicas: How many copies there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas


class DataParallel(nn.Module):
    """Runs a module on several devices at once, each with a part of the batch.

    Tensors in the inputs (inside tuples, lists, dicts and named tuples too) are cut along `dim`, as evenly as possible;
    anything else, and a tensor without dimensions, is given to every replica. Of a batch with fewer rows than there are
    devices each row gets a replica; without any tensor there is one replica. Outputs are put together in the same way:
    tensors along `dim`, tensors without dimensions to a vector; anything else must be equal in all replicas.

    Parameters get the gradients of all replicas. Replica 0 has the module's own buffers, so what it changes in them in
    place stays; what other replicas change, and attributes that a forward assigns, are lost.

    Args:
        module: Its parameters and buffers are moved to the first device.
        devices: One for each replica; a device may come several times. None: all accelerators, or the CPU.
        output_device: Where the output goes; None: the first device.
        dim: Along which dimension batches are cut.
        timeout_s: How long replicas wait for each other in a layer that spans them.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__()
        if devices is None:
            devices = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
        if not devices:
            raise ConfigError("DataParallel got no devices; give at least one, such as devices=['cpu', 'cpu']")
        self.devices = [_device(device) for device in devices]
        self.output_device = self.devices[0] if output_device is None else _device(output_device)
        self.dim = dim
        self.rendezvous = Rendezvous(noun="replica", timeout_s=timeout_s)
        self.module = module.to(self.devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Cut the inputs, run the replicas, put the outputs together. Blocks until all replicas have ended.

        Raises:
            Exception: What a replica raised, of the same type if possible, with the replica's number; chained.
        """
        num = num_parts((inputs, kwargs), self.dim, len(self.devices))
        devices = self.devices[:num]
        parts = scatter((inputs, kwargs), devices, self.dim)
        replicas = _replicate(self.module, devices)
        _run_callbacks(replicas)
        outputs = _apply(self.rendezvous, replicas, [p[0] for p in parts], [p[1] for p in parts], devices)
        return gather(outputs, self.output_device, self.dim)


def _device(device: Any) -> torch.device:
    """A device as its tensors name it: "cuda" becomes the current one."""
    return torch.empty(0, device=device).device


def add_replication_callbacks(parallel: D) -> D:
    """Give an existing `torch.nn.DataParallel` the callbacks, and replicas that meet and fail as `DataParallel`'s do.

    In place; adding them again does nothing. Without an accelerator torch's class makes no replicas at all.

    Returns:
        The same object.
    """
    if not isinstance(parallel, nn.DataParallel):
        raise ConfigError(f"expected a torch.nn.DataParallel, got a {type(parallel).__name__}")
    # On the instance: a class of the user's own keeps its methods. Partials, so that it can be copied and pickled.
    parallel.replicate = functools.partial(_replicate_by_torch, parallel)  # type: ignore[method-assign]
    parallel.parallel_apply = functools.partial(_apply_for_torch, parallel)  # type: ignore[method-assign]
    return parallel


def remove_replication_callbacks(parallel: D) -> D:
    """Undo `add_replication_callbacks`; does nothing where there is nothing to undo."""
    for name, function in (("replicate", _replicate_by_torch), ("parallel_apply", _apply_for_torch)):
        if getattr(parallel.__dict__.get(name), "func", None) is function:
            del parallel.__dict__[name]
    return parallel


def _replicate_by_torch(parallel: Any, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
    replicas: list[nn.Module] = type(parallel).replicate(parallel, module, device_ids)
    _run_callbacks(replicas)
    return replicas


def _apply_for_torch(parallel: Any, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
    kind = parallel.src_device_obj.type
    devices = [torch.device(kind, d) if isinstance(d, int) else d for d in parallel.device_ids[: len(replicas)]]
    return _apply(Rendezvous(noun="replica"), replicas, inputs, kwargs, devices)


class _ReplicaSurroundings(Tokenless):
    """What a spanning layer sees from one replica. Everyone is local, so there is nothing to exchange."""

    def __init__(self, participant: Participant) -> None:
        self.meet: Callable[[str, Any, Lead], Any] = participant.meet
        self._calls: dict[int, int] = {}

    def gather(self, tag: str, rows: Tensor) -> Tensor:
        """See `Surroundings`."""
        return rows

    def call_number(self, layer: object) -> int:
        """See `Surroundings`."""
        number = self._calls.get(id(layer), 0)
        self._calls[id(layer)] = number + 1
        return number


def _apply(
    rendezvous: Rendezvous,
    replicas: Sequence[nn.Module],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Run the replicas side by side."""
    # The caller's streams: a new thread would use the default ones.
    streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    def body(me: Participant) -> Any:
        n = me.index
        with _on(devices[n], streams[n]), inside(_ReplicaSurroundings(me)):
            return replicas[n](*inputs[n], **kwargs[n])

    def explain(me: Participant, error: BaseException) -> BaseException:
        return _in_replica(error, f"in replica {me.index} on {devices[me.index]}")

    threads = Threads("replica")  # for this forward only: a model is copied, pickled and forked, threads are not
    try:
        return side_by_side(threads, rendezvous.register(range(len(replicas))), body, explain)
    finally:
        threads.close()


@contextmanager
def _on(device: torch.device, stream: Any) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def _in_replica(error: BaseException, where: str) -> BaseException:
    """The same type of error with the replica's number, so that a caller can still tell errors apart."""
    try:
        found = type(error)(f"{where}: {error}")
    except Exception:  # noqa: BLE001  # an exception of the user's with arguments of its own
        found = ParticipantError(f"{where}: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def _run_callbacks(replicas: Sequence[nn.Module]) -> None:
    contexts = [ReplicationContext(len(replicas)) for _ in replicas[0].modules()]
    for number, replica in enumerate(replicas):
        for context, module in zip(contexts, replica.modules(), strict=True):
            callback = getattr(module, "__data_parallel_replicate__", None)
            if callback is not None:
                callback(context, number)


def _replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Shallow copies of a module and all modules in it; see `DataParallel` for what they share."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise UnsupportedError(f"'{name}' has no shape yet; call the lazy module once before DataParallel runs it")
        if tensor.device != devices[0]:
            raise UnsupportedError(f"'{name}' is on {tensor.device}, expected {devices[0]}: move the module there")
    return [_copy(module, device, number == 0, {}, {}) for number, device in enumerate(devices)]


def _copy(
    module: nn.Module, device: torch.device, first: bool, modules: dict[int, nn.Module], tensors: dict[int, Tensor]
) -> nn.Module:
    """One replica; shared modules and tensors stay shared within it."""
    if id(module) in modules:
        return modules[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(f"DataParallel cannot replicate a {type(module).__name__}; give it the Python module")
    replica = modules[id(module)] = module.__new__(type(module))
    replica.__dict__ = module.__dict__.copy()

    def moved(tensor: Tensor | None, buffer: bool) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            own = tensor.to(device)  # differentiable; the very same tensor where it is there already
            tensors[id(tensor)] = own.clone() if buffer and own is tensor and not first else own
        return tensors[id(tensor)]

    replica._parameters = {name: moved(p, False) for name, p in module._parameters.items()}  # type: ignore[misc]  # no leaves on other devices
    replica._buffers = {name: moved(b, True) for name, b in module._buffers.items()}
    replica._modules = {
        name: None if m is None else _copy(m, device, first, modules, tensors) for name, m in module._modules.items()
    }
    if isinstance(replica, nn.RNNBase):  # it keeps a list of its weights besides the places
        replica._flat_weights = [getattr(replica, name, None) for name in replica._flat_weights_names]
    return replica
