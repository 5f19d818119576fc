"""What checkpoints keep of a run, and how it goes on from them."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from evenstep.core.errors import CheckpointError, ConfigError, Stopped
from evenstep.core.output import say
from evenstep.engine.step import Engine
from evenstep.exchange.journal import Entry
from evenstep.run import checkpoint
from evenstep.run.checkpoints import Checkpoints, FoundCheckpoint, Resumption, Snapshot
from evenstep.run.claim import Claim
from evenstep.run.facts import pack, unpack
from evenstep.run.others import Others
from evenstep.run.reading import read_for_all

__all__ = ["Perform", "Saving"]

T = TypeVar("T")


class Perform(Protocol):
    """Does an operation on all workers; see `RunOperations`."""

    def __call__(self, kind: str, attempt: Callable[[], Entry], adopt: Callable[[Entry, bool], T]) -> T:
        """See `Ledger.perform`."""


class Saving:
    """The checkpoints of a run.

    Args:
        engine: Holds the state.
        others: Others who train the model.
        perform: Does an operation on all workers.
        job: Identifies the launcher's job; None: there is no launcher.

    Attributes:
        tracked: What else the user wants to keep, by name.
        position: Where the loaded checkpoint was in the data.
        next: Where batches would go on after the current one.
        interleaved: Whether loops over batches have taken turns, so that one position does not say where they are.
        ambiguous: The same of the loaded checkpoint.
    """

    def __init__(self, engine: Engine, others: Others, perform: Perform, job: str | None) -> None:
        self._engine, self._others = engine, others
        self._config, self._ledger, self._group = engine.config, engine.ledger, engine.group
        self._perform = perform
        self.tracked: dict[str, Any] = {}
        self.position: dict[str, int] | None = None
        self.next: dict[str, int] | None = None
        self.interleaved = self.ambiguous = False
        self._data: list[list[int | None]] = []  # the sizes of the data used so far
        self._past: list[list[int | None]] = []  # the same in the loaded checkpoint
        self._checkpoints: Checkpoints | None = None
        self._resumption: Resumption | None = None
        self._hold: Claim | None = None
        self._last: Snapshot | None = None
        self._num_saved = 0  # how often the script has called `save`
        self._fingerprints = self._group.board.fingerprints_asked
        self._run = job or f"process {os.getpid()} on {socket.gethostname()}"

    def track(self, name: str, value: Any) -> None:
        """See `Run.track`."""
        if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
            raise ConfigError(
                f"track got a {type(value).__name__}; expected an object with state_dict and load_state_dict"
            )
        self.tracked[name] = value

    def begin_data(self, num_samples: int | None, batch_size: int | None, num_workers: int | None) -> None:
        """Note that a data set is about to be used; check that the checkpoint we resume from used one like it.

        Args:
            num_samples: How many samples it has; None: unknown.
            batch_size: Samples in a global batch, if all have the same number.
            num_workers: The number of workers that its global batches were scaled by, if any.

        Raises:
            CheckpointError: It used another.
        """
        sizes, number = [num_samples, batch_size], len(self._data)
        if self._resumption is not None:
            self._resumption.check_data(number, sizes)
        if num_workers is not None and number < len(self._past) and self._past[number] != sizes:
            raise CheckpointError(
                f"the checkpoint that was loaded had {self._past[number][0]} samples in global batches of "
                f"{self._past[number][1]}; with batch_per_worker=True, {num_workers} workers make global batches of "
                f"{sizes[1]} of {sizes[0]} here: start as many workers as then, or give batch_size="
                f"{self._past[number][1]} without batch_per_worker"
            )
        self._data.append(sizes)

    def save(self, path: Path, *, writes: bool) -> None:
        """See `Run.save`.

        Args:
            path: Where it goes.
            writes: Whether the first worker of this group is to write it.
        """
        tag, self._num_saved = f"save {self._num_saved}", self._num_saved + 1

        def attempt() -> Entry:
            failure = None
            self._others.level(tag)
            if self._group.rank == 0 and writes:
                try:
                    self._check_home()
                    checkpoint.write(path, self._others.tensors(), self._facts())
                except CheckpointError as error:
                    failure = str(error)
            return Entry("save", self._group.gather_json("save", failure)[0])

        failure = self._perform("save", attempt, lambda entry, _: entry.value)
        if failure is not None:
            raise CheckpointError(failure)

    def load(self, path: Path) -> None:
        """See `Run.load`."""

        def attempt() -> Entry:
            facts, tensors = read_for_all(self._group, "load", read)
            if "failure" in facts:  # nothing has been changed yet
                return Entry("load", facts)
            news, carried = self._engine.holdings.restore(tensors, facts["values"])
            return Entry("load", {**facts, "news": news, "carried": carried})

        def read() -> tuple[dict[str, Any], dict[str, Tensor]]:
            self._check_home()
            facts, tensors = checkpoint.read(path, tensors=True)
            here = {**self._identity(), "tracked": sorted(self.tracked)}
            checkpoint.check(path, facts, tensors, here, self._engine.state.tensors())
            return facts, tensors

        def adopt(entry: Entry, took_part: bool) -> str | None:
            facts = entry.value
            if "failure" in facts:
                return str(facts["failure"])
            self._engine.holdings.restored(facts["news"], facts["carried"], facts["version"], took_part)
            self._take_over(facts)
            if took_part and self._engine.state.fingerprint() != facts["fingerprint"]:
                raise CheckpointError(f"{path} was loaded but its fingerprint differs from the one that was saved")
            return None

        failure = self._perform("load", attempt, adopt)
        if failure is not None:
            raise CheckpointError(failure)

    def _take_over(self, facts: dict[str, Any]) -> None:
        """Adopt what a loaded checkpoint holds besides the engine's state."""
        for prepared, groups in zip(self._engine.optimizers, facts["groups"], strict=True):
            prepared.set_hyperparameters(unpack(groups))
        for name, value in self.tracked.items():
            value.load_state_dict(unpack(facts["tracked"][name]))
        self.position = self.next = facts["position"]
        self.ambiguous = self.interleaved = facts.get("interleaved", False)
        self._past = facts["data"]

    def begin(self, directory: Path, every: int | str, keep: int, *, resume: bool) -> None:
        """See `Run.checkpoint`."""
        self.close()
        saves = self._checkpoints = Checkpoints(
            directory, every, keep, lambda path: self._group.tell({"saved": str(path)})
        )
        self._engine.state.saved = lambda version: saves.read(version) if self._group.at_home else {}

        def attempt() -> Entry:
            found, failure = self._find(saves, directory, resume=resume) if self._group.rank == 0 else (None, None)
            facts = found and {
                "path": str(found.path),
                "entries": len(found.entries),
                **{key: found.facts[key] for key in ("data", "fingerprint")},
            }
            facts, run, failure = self._group.gather_json("checkpoint", [facts, self._run, failure])[0]
            if failure is not None:
                raise CheckpointError(failure)
            return Entry("checkpoint", {"run": run, "from": facts}, followers=found.entries if found else ())

        def adopt(entry: Entry, _: bool) -> None:
            self._claim(directory, entry.value["run"])
            facts = entry.value["from"]
            if facts is not None:
                self._resumption = Resumption(Path(facts["path"]), facts, self._engine, self._ledger)
                for number, sizes in enumerate(self._data):
                    self._resumption.check_data(number, sizes)

        self._perform("checkpoint", attempt, adopt)

    def _find(self, saves: Checkpoints, directory: Path, *, resume: bool) -> tuple[FoundCheckpoint | None, str | None]:
        """Claim the directory, and find what to continue from, if anything; or say why that fails."""
        try:
            self._check_home()
            self._claim(directory, self._run)
            found = saves.find(self._identity(), self._engine.state.tensors(), self._ledger) if resume else None
        except CheckpointError as error:
            return None, str(error)
        return found, None

    def _check_home(self) -> None:
        """Check that this worker, the first, is on the machine where files are.

        Raises:
            CheckpointError: It is not: all workers of that machine are lost at the moment.
        """
        if not self._group.at_home:
            raise CheckpointError("no worker is left on the machine that reads and writes files; try again when one is")

    def _claim(self, directory: Path, run: str) -> None:
        """Claim the directory for each worker of the machine that writes files: any of them may come to write."""
        if self._hold is None and self._group.at_home:
            hold = Claim(directory, run)
            hold.take()
            self._hold = hold

    def say_if_none(self) -> None:
        """Before the first step of a run that is to be resumed: say so if it has no checkpoints."""
        fresh = self._checkpoints is None and not self._engine.version and not self._ledger.catching_up
        if fresh and self._group.rank == 0:
            say("--resume, but the script has not called run.checkpoint(directory, every=...): starting over")

    def heed(self) -> None:
        """After a step: write a checkpoint if one is due; report a fingerprint or stop if asked to."""
        if not self._ledger.took_part:
            return
        if self._group.rank == 0 and (wanted := self._group.board.fingerprints_asked) != self._fingerprints:
            self._fingerprints = wanted
            self._others.collect()
            self._group.tell({"fingerprint now": [self._engine.version, self._engine.state.fingerprint()]})
        _, asked, stop = self._ledger.asked
        saves = self._checkpoints if self._group.rank == 0 and self._group.at_home else None
        if saves is not None and (stop or saves.due(self._engine.version, asked)):
            saves.write(self._snapshot(), wait=bool(stop))
        if stop:
            if self._group.rank == 0:
                path = saves and saves.newest()
                self._group.tell({"stopped": {"step": self._engine.version, "checkpoint": path and str(path)}})
            raise Stopped

    def conclude(self) -> None:
        """After the last step: if one was due there while another was being written, `close` will write it."""
        writes = self._group.rank == 0 and self._group.at_home and self._ledger.took_part
        saves = self._checkpoints if writes else None
        if saves is not None and not self._ledger.catching_up and saves.is_missing(self._engine.version):
            self._last = self._snapshot()

    def _snapshot(self) -> Snapshot:
        tensors = {name: tensor.clone() for name, tensor in self._engine.state.tensors().items()}
        return Snapshot(tensors, self._facts(), self._ledger.journal.packed(self._ledger.done))

    def _facts(self) -> dict[str, Any]:
        return {
            **self._identity(),
            "version": self._engine.version,
            "position": self.next,
            "interleaved": self.interleaved,
            "data": list(self._data),
            "values": dict(self._engine.state.values),
            "groups": [pack(prepared.hyperparameters()) for prepared in self._engine.optimizers],
            "tracked": {name: pack(value.state_dict()) for name, value in self.tracked.items()},
        }

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to fit."""
        said = {name: getattr(self._config, name) for name in ("shards", "seed", "arithmetic")}
        return {**said, "optimizers": len(self._engine.optimizers)}

    def close(self) -> None:
        """Write what is still missing, for a bounded time, and release the directory."""
        self._engine.state.saved = None
        if self._checkpoints is not None:
            last, self._last = self._last, None
            if last is not None:
                self._checkpoints.write(last, wait=False)
            self._checkpoints.close()
        if self._hold is not None:
            self._hold.release()
            self._hold = None
