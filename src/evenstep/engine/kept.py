"""What an optimizer keeps for its parameters (momenta, counts of steps), in the state that all workers share.

Each owner makes and changes it for its own parameters. What is new, the *news*, travels with the step that made it:
every worker makes room for it in the same order, the owner puts its values there, and from then on every worker's
optimizer holds the same tensors.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.core.errors import NondeterminismError, UnsupportedError
from evenstep.engine.form import Form
from evenstep.engine.state import State, StateEntry

__all__ = ["OPTIONS", "Kept", "News"]

OPTIONS = "options of all groups"
"""A key among the plain values of the first parameter: options that the optimizer itself has changed."""

News = list[Any]
"""What is new in optimizers' state: [parameter, {key: its form}, {key: plain value}], in order."""


class Kept:
    """What one optimizer keeps.

    Args:
        state: Where it goes.
        optimizer: The user's optimizer.
        parameters: What it trains; may grow.
        names: Their full names; grow with them.
        prefix: What the names of its entries begin with.
    """

    def __init__(
        self, state: State, optimizer: Optimizer, parameters: list[nn.Parameter], names: list[str], prefix: str
    ) -> None:
        self._state, self._optimizer, self._prefix = state, optimizer, prefix
        self._parameters, self._names = parameters, names
        self._entries: dict[int, dict[str, StateEntry]] = {}
        self._values: dict[int, dict[str, Any]] = {}
        self._undo: dict[int, dict[str, Any]] = {}
        self._left: list[tuple[dict[str, Any], dict[str, tuple[Tensor, int]]]] = []  # what the last step left
        for p in parameters:  # an optimizer may make state when it is built, before the model moved to its device
            held = optimizer.state.get(p, {})
            held.update({k: v.to(p.device) for k, v in held.items() if isinstance(v, Tensor) and v.ndim})

    def _held(self, i: int) -> dict[str, Any]:
        found: dict[str, Any] = self._optimizer.state.get(self._parameters[i], {})
        return found

    # ---- changing it, such that it can be taken back ----

    def begin(self, indices: Iterable[int]) -> None:
        """Note that what is kept for these parameters is about to be changed."""
        self._undo = {i: dict(self._held(i)) for i in indices}

    def entries(self, indices: Iterable[int]) -> list[StateEntry]:
        """All tensors that are kept for these parameters and already shared."""
        return [entry for i in indices for entry in self._entries.get(i, {}).values()]

    def entries_of(self, news: News) -> list[StateEntry]:
        """The entries of the tensors of some news."""
        return [self._entries[i][key] for i, tensors, _ in news for key in sorted(tensors)]

    def committed(self) -> list[StateEntry]:
        """Everything that is committed."""
        return [entry for entry in self.entries(self._entries) if entry.counts]

    def save_all(self) -> None:
        """Save everything that is committed."""
        self._state.save(self.committed())

    def rollback(self) -> None:
        """Forget what an abandoned operation created or replaced."""
        for i, before in self._undo.items():
            if before:
                self._optimizer.state[self._parameters[i]] = before
            else:
                self._optimizer.state.pop(self._parameters[i], None)
        self._undo = {}

    # ---- news ----

    def news(self, indices: Iterable[int]) -> News:
        """What is kept for these parameters and not shared yet.

        Raises:
            UnsupportedError: It is neither a tensor nor a plain value.
        """
        news = []
        for i in indices:
            tensors: dict[str, Any] = {}
            values: dict[str, Any] = {}
            for key, value in self._held(i).items():
                entry = self._entries.get(i, {}).get(key)
                if isinstance(value, Tensor):
                    if entry is None or entry.working is not value:
                        tensors[key] = Form.of(value).pack()
                elif not isinstance(value, int | float | str | bool | None):
                    raise UnsupportedError(
                        f"{type(self._optimizer).__name__} keeps a {type(value).__name__} as '{key}' for "
                        f"'{self._names[i]}'; evenstep can share only tensors and plain numbers"
                    )
                elif key not in self._values.get(i, {}) or self._values[i][key] != value:
                    values[key] = value
            if tensors or values:
                news.append([i, tensors, values])
        return news

    def news_of(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> News:
        """A checkpoint's tensors and plain values of this optimizer, as news."""
        news = []
        for i, name in enumerate(self._names):
            head = f"{self._prefix}.{name}."
            mine = {key.removeprefix(head): Form.of(t).pack() for key, t in tensors.items() if key.startswith(head)}
            plain = {key.removeprefix(head): v for key, v in values.items() if key.startswith(head)}
            if mine or plain:
                news.append([i, mine, plain])
        return news

    def settle(self, news: News, mine: Collection[int]) -> None:
        """Move what is new into the shared state. All workers must call this alike, inside an operation.

        Args:
            news: The news of all workers, in the order of the parameters: it determines the layout.
            mine: The parameters for which this worker has the values.
        """
        self._reserve(news)
        for i, tensors, _ in news:
            held = self._optimizer.state[self._parameters[i]]
            self._undo.setdefault(i, dict(held))
            if i in mine:
                for key in tensors:
                    self._entries[i][key].live.copy_(held[key])
            self._hold(i, tensors)

    def _reserve(self, news: News) -> None:
        """Make room for tensors without any. Trying an operation again makes the same room, so it may stay."""
        fresh = {
            (i, key): Form.unpack(packed)
            for i, tensors, _ in news
            for key, packed in sorted(tensors.items())
            if key not in self._entries.setdefault(i, {})
        }
        if not fresh:  # even an empty reservation takes room, and another attempt would take it again
            return
        entries = self._state.add({f"{self._prefix}.{self._names[i]}.{key}": form for (i, key), form in fresh.items()})
        for (i, key), entry in zip(fresh, entries, strict=True):
            self._entries[i][key] = entry

    def _hold(self, i: int, keys: Iterable[str]) -> None:
        """Make the optimizer use the shared tensors."""
        held = self._optimizer.state[self._parameters[i]]
        for key in keys:
            held[key] = self._entries[i][key].working

    def adopt(self, news: News, took_part: bool) -> None:
        """Adopt the news of a committed operation."""
        if not took_part:
            self._reserve(news)
        for i, tensors, values in news:
            held = self._optimizer.state[self._parameters[i]]
            if not took_part:
                self._hold(i, tensors)
            for key in tensors:
                self._entries[i][key].counts = True
            for key, value in values.items():
                if key != OPTIONS:
                    held[key] = value
                    self._values.setdefault(i, {})[key] = value
                    self._state.values[f"{self._prefix}.{self._names[i]}.{key}"] = value
        self._undo = {}

    # ---- edits ----

    def edited(self) -> tuple[News, list[Any]]:
        """What user code has changed since `begin`: news, and [parameter, keys that are gone].

        Raises:
            UnsupportedError: A tensor got another shape or type.
        """
        news = self.news(range(len(self._parameters)))
        for i, tensors, _ in news:
            for key, packed in tensors.items():
                known, form = self._entries.get(i, {}).get(key), Form.unpack(packed)
                if known is not None and (known.live.shape, known.live.dtype) != (form.shape, form.dtype):
                    raise UnsupportedError(
                        f"run.edit turned '{key}' of '{self._names[i]}' in {type(self._optimizer).__name__} into "
                        f"{form.dtype} {tuple(form.shape)}; expected {known.live.dtype} {tuple(known.live.shape)} as "
                        "before"
                    )
        gone = [[i, [key for key in before if key not in self._held(i)]] for i, before in self._undo.items()]
        return news, [[i, keys] for i, keys in gone if keys]

    def drop(self, gone: Sequence[Any]) -> None:
        """Drop what a committed edit has removed."""
        for i, keys in gone:
            held = self._optimizer.state[self._parameters[i]]
            for key in keys:
                held.pop(key, None)
                self._values.get(i, {}).pop(key, None)
                self._state.values.pop(f"{self._prefix}.{self._names[i]}.{key}", None)
                if key in self._entries.get(i, {}):
                    self._entries[i][key].counts = False

    def remember(self) -> None:
        """Remember it, now that only a step or an edit should change it."""
        held = [found for i in range(len(self._parameters)) if (found := self._held(i))]
        self._left = [
            (each, {key: (t, t._version) for key, t in each.items() if isinstance(t, Tensor)}) for each in held
        ]
        self._held_by = self._optimizer.state

    def check_untouched(self) -> None:
        """Report it if user code changed it between steps.

        Raises:
            NondeterminismError: It did.
        """
        same = self._optimizer.state is self._held_by and all(
            held.get(key) is tensor and tensor._version == version
            for held, tensors in self._left
            for key, (tensor, version) in tensors.items()
        )
        if not same:
            raise NondeterminismError(
                f"the state of {type(self._optimizer).__name__} was changed between steps; the workers share it, so it "
                "is changed once for all of them: run.edit(lambda: optimizer.load_state_dict(...)), or load it before "
                "run.prepare"
            )

    def release(self) -> None:
        """Give the optimizer all of it as ordinary tensors, whatever their owners."""
        for i, entries in self._entries.items():
            for key, entry in entries.items():
                if entry.counts and self._state.memory.shared:
                    self._optimizer.state[self._parameters[i]][key] = entry.live.clone()
