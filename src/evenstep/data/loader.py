"""How a worker gets the samples of its own shards: inline, or through loader processes with a bounded queue.

Every sample is drawn with the random generators seeded by (seed, epoch, index), so an augmentation gives the same
pixels whichever worker or loader process draws it. Sample code always runs with one intra-op thread.
"""

import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from evenstep.core.errors import ConfigError, EvenstepError, SilenceError
from evenstep.data.batch import Batch
from evenstep.data.contents import contents_of, shortened
from evenstep.data.drawing import drawing
from evenstep.data.order import BatchRequest, Indices
from evenstep.data.sending import sent
from evenstep.engine.randomness import derive, seed_all
from evenstep.engine.reports import UNSTEADY
from evenstep.native import core

__all__ = ["Collate", "Loader", "Tabular", "num_samples"]

Collate = Callable[[list[Any]], Any]
_SLICE_S = 0.5  # how soon a loader process that died is noticed, at the latest
_FEW, _SOME = 3, 64  # how many samples workers compare: drawn one by one, or all at once


class Tabular(Dataset[Any]):
    """A data set without randomness of its own, which can give several samples at once."""

    def parts(self, indices: Sequence[Indices]) -> list[Any]:
        """The samples of several parts, each collated as `default_collate` would, without making each one."""
        raise NotImplementedError


class _Loaded(NamedTuple):
    """What was loaded of a batch: the parts of some shards, and what workers compare, if they do."""

    parts: dict[int, Any]
    probes: dict[str, str]


class _Parts(Dataset[_Loaded]):
    """A data set of batches: takes a request, gives the parts of some shards."""

    def __init__(self, dataset: Any, span: range, seed: int, purpose: str, collate: Collate | None) -> None:
        self._dataset, self._span, self._seed, self._purpose = dataset, span, seed, purpose
        self._collate: Collate = collate or default_collate
        self._rows = _rows_of(dataset) if collate is None else None

    def __getitem__(self, request: BatchRequest) -> _Loaded:
        return _Loaded(self.parts(request), self.probes(request) if request.is_compared else {})

    def parts(self, request: BatchRequest) -> dict[int, Any]:
        """The parts of the shards."""
        chosen = {k: request.shards[k] for k in self._span if len(request.shards[k])}
        if self._rows is not None:
            return dict(zip(chosen, self._rows(list(chosen.values())), strict=True))
        with drawing():
            return {k: self._collate(self._draw(request, indices)) for k, indices in chosen.items()}

    def probes(self, request: BatchRequest) -> dict[str, str]:
        """Descriptions of a few samples of the whole batch, which every worker draws, twice."""
        if self._rows is not None:
            (rows,) = self._rows([request.probes(_SOME)])
            return shortened(contents_of(rows, "samples"), "samples")
        chosen = request.probes(_FEW)
        found, again = self._described(request, chosen), self._described(request, chosen)
        return {path: what if again.get(path) == what else UNSTEADY for path, what in found.items()}

    def _described(self, request: BatchRequest, chosen: Indices) -> dict[str, str]:
        with drawing():
            drawn = zip(chosen, self._draw(request, chosen), strict=True)
            found = [shortened(contents_of(sample, f"sample {i}"), f"sample {i}") for i, sample in drawn]
            if self._collate is not default_collate:  # it may draw too, and expect as many samples as a part has
                part = self._collate(self._draw(request, next(filter(len, request.shards))))
                found.append(shortened(contents_of(part, "samples of a part"), "samples of a part"))
        return {path: what for each in found for path, what in each.items()}

    def _draw(self, request: BatchRequest, indices: Indices) -> list[Any]:
        samples = []
        for index in indices.tolist():
            seed_all(derive(self._purpose, self._seed, request.position.epoch, index))
            samples.append(self._dataset[index])
        return samples


def _rows_of(dataset: Any) -> Callable[[Sequence[Indices]], list[Any]] | None:
    """A function that gives the samples of several parts at once, if there is one and nothing about them is random."""
    if isinstance(dataset, Tabular):
        return dataset.parts
    if type(dataset) is not TensorDataset:
        return None
    tensors = dataset.tensors

    def rows(indices: Sequence[Indices]) -> list[Any]:
        return [[tensor[chosen] for tensor in tensors] for chosen in map(torch.from_numpy, indices)]

    return rows


def num_samples(dataset: Any) -> int:
    """How many samples a map-style data set has.

    Raises:
        ConfigError: It is not a map-style data set.
    """
    name = type(dataset).__name__
    others = (
        "for data that can only be read in order there is run.batches(evenstep.data.stream(make), ...), and whole "
        "global batches can go to run.step(batch, function) as they are"
    )
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"the data set is a {name}; expected what it loads from: pass loader.dataset, and its batch_size and "
            f"collate_fn ({others})"
        )
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not indexed or isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"the data set is a {name} without __getitem__ and __len__; expected a map-style one ({others})"
        )
    return len(dataset)


class Loader:
    """Loads the parts of one worker.

    Args:
        dataset: Any map-style data set.
        span: Says which shards are this worker's now; they may change while batches are loaded.
        seed: The run's seed.
        purpose: Separates the random streams of training and evaluation.
        device: Where the samples go.
        collate: Makes a part from a list of samples; torch's `default_collate` if None.
        loaders: How many loader processes; 0 loads inline.
        prefetch: How many batches each loader process holds ready.
        timeout_s: How long to wait for a loader process.
        skip: Says whether the next batch can be left unloaded because its result is already known.
    """

    def __init__(
        self,
        dataset: Any,
        span: Callable[[], range],
        seed: int,
        purpose: str,
        *,
        device: str = "cpu",
        collate: Collate | None = None,
        loaders: int = 0,
        prefetch: int = 2,
        timeout_s: float = 300.0,
        skip: Callable[[], bool] = lambda: False,
    ) -> None:
        num_samples(dataset)
        if loaders < 0 or prefetch < 1:
            raise ConfigError(f"loaders={loaders}, prefetch={prefetch}; expected loaders >= 0 and prefetch >= 1")
        self._span, self._skip, self._device = span, skip, device
        self._parts_of: Callable[[range], _Parts] = lambda shards: _Parts(dataset, shards, seed, purpose, collate)
        self._loaders, self._prefetch, self._timeout_s = loaders, prefetch, timeout_s

    def load(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """The batches, in order, on their way to the device if that is a GPU.

        Loader processes start at the first and end with the iterator, or with us. What they load is sent one batch
        ahead; what is loaded inline is sent while the GPU still computes the step before.

        Raises:
            SilenceError: No batch came from the loader processes within the timeout.
            EvenstepError: A loader process was killed.
        """
        batches, device = self._load(requests), torch.device(self._device)
        return batches if device.type == "cpu" else sent(batches, device, ahead=1 if self._loaders else 0)

    def _load(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        coming, waiting = iter(requests), deque[BatchRequest]()
        while True:
            if not waiting:
                request = next(coming, None)
                if request is None:
                    return
                waiting.append(request)
            if self._skip():
                yield self._batch(waiting.popleft(), {})
            elif self._loaders == 0:
                request = waiting.popleft()
                yield self._batch(request, self._parts_of(self._span()).parts(request))
            else:
                yield from self._through_processes(waiting, coming)

    def _batch(self, request: BatchRequest, parts: dict[int, Any], probes: dict[str, str] | None = None) -> Batch:
        def load(shard: int) -> Any:
            return self._parts_of(range(shard, shard + 1)).parts(request)[shard]

        compared = cache(lambda: self._probe(request) if probes is None else probes) if request.is_compared else None
        return Batch(request.name, request.sizes, load, parts, self._device, request.position, probes=compared)

    def _probe(self, request: BatchRequest) -> dict[str, str]:
        """What workers compare of a batch that was not loaded by a loader process.

        Where there are loader processes, one of them draws it: a data set may open files that must not be inherited.
        """
        if self._loaders == 0:
            return self._parts_of(range(0)).probes(request)
        (loaded,) = self._wait_for(self._processes(range(0), [request], 1))
        return loaded.probes

    def _through_processes(self, waiting: deque[BatchRequest], coming: Iterator[BatchRequest]) -> Iterator[Batch]:
        """Batches from loader processes, for as long as they load the right shards.

        Args:
            waiting: Requests that have not been answered yet; kept up to date.
            coming: The requests after those.
        """
        span, again = self._span(), list(waiting)

        def asked() -> Iterator[BatchRequest]:
            yield from again
            for request in coming:
                waiting.append(request)
                yield request

        for loaded in self._wait_for(self._processes(span, asked(), self._loaders)):
            yield self._batch(waiting.popleft(), *loaded)
            if self._span() != span:
                return

    def _processes(self, span: range, requests: Iterable[BatchRequest], count: int) -> Iterator[_Loaded]:
        """What loader processes load of some requests. They end with the iterator."""
        loader = DataLoader(
            self._parts_of(span),
            batch_size=None,
            sampler=requests,
            num_workers=count,
            prefetch_factor=self._prefetch,
            collate_fn=_as_it_is,
            worker_init_fn=_loader_begins,
            timeout=min(self._timeout_s, _SLICE_S),
            multiprocessing_context="fork",
            generator=torch.Generator(),
        )
        before = signal.getsignal(signal.SIGCHLD)
        batches = iter(loader)
        if signal.getsignal(signal.SIGCHLD) is not before:
            # When a loader process dies, torch's handler raises wherever this process happens to be, perhaps inside a
            # queue whose lock then stays locked; so we check ourselves whether they are alive.
            signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
        return batches

    def _wait_for(self, batches: Iterator[_Loaded]) -> Iterator[_Loaded]:
        """The batches, each awaited in slices: torch checks whether its processes are alive only between waits."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:
                text = str(error)
                if "in DataLoader worker process" in text:
                    raise  # the data set's own error, with its traceback
                if isinstance(error, RuntimeError) and not text.startswith(
                    ("DataLoader timed out", "DataLoader worker")
                ):
                    raise
                if text.startswith("DataLoader timed out"):
                    if time.monotonic() < deadline:
                        continue
                    raise SilenceError(
                        f"no batch came from the loader processes within {self._timeout_s:g} s; look at what the data "
                        "set does, or raise Run(timeout_s=...)"
                    ) from error
                raise EvenstepError(
                    f"a loader process ended while a batch was awaited ({text or type(error).__name__}); if the system "
                    "killed it, memory may be short: use fewer loaders or a smaller prefetch"
                ) from error
            yield batch
            deadline = time.monotonic() + self._timeout_s


def _as_it_is(batch: Any) -> Any:
    return batch


def _loader_begins(_: int) -> None:
    core.die_with_parent()
