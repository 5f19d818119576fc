"""What the workers of a run hold together: models, their optimizers, the state of both, and its version.

It changes only in operations of the ledger. Before something is changed it is saved, so that an operation that fails
can be undone.
"""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from evenstep.core.config import RunConfig
from evenstep.core.errors import CheckpointError, UnsupportedError, WrongError
from evenstep.engine.carries import Carried, Carries
from evenstep.engine.carrying import BetweenMachines
from evenstep.engine.image import Image
from evenstep.engine.kept import News
from evenstep.engine.models import Models
from evenstep.engine.optimizer_set import OptimizerSet, Trained
from evenstep.engine.prepared import PreparedOptimizer
from evenstep.engine.spreading import Spreading, ThroughHost
from evenstep.exchange.group import Group
from evenstep.exchange.ledger import Ledger
from evenstep.plan.sites import Sites
from evenstep.transport.memory import DeviceMemory, HostMemory, Memory
from evenstep.transport.segment import Segment

__all__ = ["Holdings"]


class Holdings:
    """One worker's view of it.

    Args:
        config: The run's settings.
        ledger: The workers' ledger.

    Attributes:
        group: The workers.
        memory: Where the state is.
        models: The prepared models.
        optimizers: The prepared optimizers.
        state: The tensors and plain values of both.
        carries: What steps hand on to the next, which is part of the state.
        version: How many steps have been committed.
    """

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self.config, self.ledger, self.group = config, ledger, ledger.group
        self.memory = _memory_of(config.device, self.group.segment)
        self.models = Models(config, self.group, self.memory)
        self.optimizers: list[PreparedOptimizer] = []
        self._several: dict[tuple[int, ...], OptimizerSet] = {}
        self.state = self.models.state
        self.state.spreading = _spreading(self.group, self.memory)
        ledger.volatile = not self.memory.shared
        if ledger.volatile and self.group.elastic and config.image:  # otherwise all workers end together
            self.state.image = Image(self.group, self.memory.device, config.image)
        self.carries = Carries(self.state, ledger, lambda: self.version)
        self.version = 0

    @property
    def names(self) -> dict[int, str]:
        """The full name of every prepared parameter, by its id."""
        return {id(parameter): name for name, parameter in self.models.slots.parameters.items()}

    def add(self, optimizer: Optimizer, *, whole: bool = False) -> PreparedOptimizer:
        """Make room for an optimizer of prepared models. All workers must call this alike; it talks to nobody.

        Args:
            optimizer: The optimizer.
            whole: Whether it looks at all parameters at once, so that one worker steps them.
        """
        prefix = "optimizer" if not self.optimizers else f"optimizer{len(self.optimizers) + 1}"
        prepared = PreparedOptimizer(self.group, self.state, optimizer, self.names, prefix, whole=whole)
        self.optimizers.append(prepared)
        return prepared

    def together(self, optimizers: Sequence[PreparedOptimizer]) -> Trained:
        """Some prepared optimizers, to step together.

        Raises:
            ConfigError: A parameter is in two of them.
        """
        if len(optimizers) == 1:
            return optimizers[0]
        key = tuple(map(id, optimizers))
        if key not in self._several:
            self._several[key] = OptimizerSet(optimizers)
        return self._several[key]

    def replace(self, values: Mapping[str, Tensor]) -> None:
        """Replace some values of the state. For one worker, inside an operation."""
        entries = [self.state.entries[name] for name in values]
        with torch.no_grad():
            self.state.save(entries)
            for entry in entries:
                entry.live.copy_(values[entry.name])

    def pull(self) -> None:
        """Bring this worker's own copies up to what is committed."""
        with torch.no_grad():
            self.state.pull()

    def settle(self) -> None:
        """End an operation on this worker: nobody should change anything until the next."""
        for prepared in self.optimizers:
            prepared.gradients.clear()
            prepared.kept.remember()
        self.models.slots.bind_base()
        self.models.remember()

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> tuple[list[News], Carried]:
        """Put a checkpoint's state in place of the current one. All workers must call this alike, in an operation.

        Args:
            tensors: The state, by name. Only the first worker's have values; see `Form.without_values`.
            values: The plain values besides it.

        Returns:
            What is new in each optimizer's state, and what is carried.
        """
        news = [prepared.kept.news_of(tensors, values) for prepared in self.optimizers]
        with torch.no_grad():
            for prepared, theirs in zip(self.optimizers, news, strict=True):
                prepared.settle(theirs, set())
            carried = self.carries.news_of(tensors, values)
            self.carries.settle(carried)
        names = [name for name in tensors if name in self.state.entries]
        entries = [self.state.entries[name] for name in names]
        if self.group.rank == 0:
            self.replace({name: tensors[name] for name in names})
        elif self.state.sites.is_first and 0 not in self.state.sites.mine:
            self.state.save(entries)
        self.state.spread("checkpoint", entries, 0)
        self.group.barrier("checkpoint restored")
        return news, carried

    def restored(self, news: list[News], carried: Carried | None, version: int, took_part: bool) -> None:
        """Adopt a checkpoint's state, which is committed. `carried` None: the carries are already known."""
        for prepared, theirs in zip(self.optimizers, news, strict=True):
            prepared.adopt(theirs, took_part)
        if carried is not None:
            self.carries.replace(carried)
        self.pull()
        self.settle()
        self.version = version

    def place(self) -> None:
        """Begin a generation: find out who is around which memory."""
        if not self.memory.shared:
            if self.group.num_machines > 1:
                raise UnsupportedError(
                    f"device={self.config.device!r} on {self.group.num_machines} machines: GPUs of one machine only "
                    "so far; use one machine, or device='cpu'"
                )
            self.group.segment.memory.clear_scratch()
        group = self.group
        self.state.sites = Sites.of(group.rank, group.machines if self.memory.shared else range(group.num_workers))

    def catch_up(self) -> None:
        """Give sites that lack the state that of one that has it. For all workers, in a new generation.

        Raises:
            CheckpointError: Nobody has it any more.
            WrongError: Only its image is left, and that is wrong.
        """
        group, sites = self.group, self.state.sites
        if self.memory.shared:
            if sites.are_one and not group.board.lacks_state:
                return
            lacking = group.gather_json("who has the state", group.board.lacks_state)
        else:
            lacking = list(self.ledger.missing)
            if self.state.image is not None:
                self.state.image.begin()
        if all(lacking):
            self._begin_from_image()
        elif any(lacking):
            entries = [entry for _, entry in sorted(self.state.entries.items()) if entry.counts]
            only = [site for site, ranks in enumerate(sites.members) if lacking[ranks[0]]]
            self.state.spread("the state", entries, lacking.index(False), only)

    def _begin_from_image(self) -> None:
        """Start from the image: nobody has the state any more, or there has never been any.

        Raises:
            CheckpointError: There is no image of it.
            WrongError: The image is not what was copied there.
        """
        image = self.state.image
        if image is not None and self.ledger.done == image.operations:
            wrong = self.group.gather_json("wrong images", self.state.names_in(image.wrong()))
            if found := next(filter(None, wrong), None):
                raise WrongError(
                    "all workers were lost, and the image of the state is not what was copied there, in or beside "
                    f"'{found[0]}': the memory of machine {socket.gethostname()} has changed by itself. It is not "
                    "used; go on from the last checkpoint, on another machine (--resume)"
                )
            with torch.no_grad():
                image.load()
        elif self.ledger.journal.committed:
            where = "machines with the state" if self.memory.shared else "workers with the state on their GPUs"
            raise CheckpointError(
                f"all {where} were lost at once, and the state with them; go on from the last checkpoint, if "
                "run.checkpoint has written any: evenstep run --resume"
            )

    def release(self) -> None:
        """Give models and optimizers back to the user as ordinary ones."""
        for prepared in self.optimizers:
            prepared.gradients.close()
            prepared.guard.remove()
        self.models.release(self.optimizers)
        if self.state.image is not None:
            self.state.image.close()


def _spreading(group: Group, memory: Memory) -> Spreading:
    """How values get from one site to the others."""
    if group.puts is not None and isinstance(memory, HostMemory):
        return BetweenMachines(group, group.puts, memory)
    return ThroughHost(group)


def _memory_of(device: str, segment: Segment) -> Memory:
    """The memory in which a site on this device keeps its state."""
    where = torch.device(device)
    if where.type == "cpu":
        return segment.memory
    return DeviceMemory(where)
