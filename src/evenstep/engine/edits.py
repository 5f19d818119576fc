"""User code that changes an optimizer's state between steps, in a way that can be undone and shared.

Most edits leave optimizers alone (clipping weights, averaging them), so their state is saved only when it is first
accessed.
"""

from collections import defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.optim import Optimizer

__all__ = ["Edit"]


class Edit:
    """A context in which user code may change an optimizer.

    Args:
        optimizer: The optimizer.
        save: Called once, before its state can have been changed.

    Attributes:
        touched: Whether its state may have been changed.
    """

    def __init__(self, optimizer: Optimizer, save: Callable[[], None]) -> None:
        self._optimizer, self._save = optimizer, save
        self._before = optimizer.state
        self.touched = False

    def touch(self) -> None:
        """Note that the state is about to be accessed."""
        if not self.touched:
            self.touched = True
            self._save()

    def __enter__(self) -> "Edit":
        self._optimizer.state = self._watched = _Watched(self.touch, self._before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after, self._optimizer.state = self._optimizer.state, self._before
        if after is not self._watched:  # as load_state_dict does
            self.touch()
        if self.touched:
            values = dict(after)
            self._before.clear()
            self._before.update(values)


class _Watched(defaultdict[Any, Any]):
    """An optimizer's state that reports its first access."""

    def __init__(self, touch: Callable[[], None], values: dict[Any, Any]) -> None:
        super().__init__(dict, values)
        self._touch = touch

    def copy(self) -> Any:
        """As for any dict; it counts as an access, since the copy gives access to the values."""
        return defaultdict(dict, self)

    def __reduce__(self) -> Any:  # a copy of the optimizer is an ordinary one
        return defaultdict, (dict,), None, None, iter(self.items())


def _saying_so(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    def looked_at(self: _Watched, *args: Any, **kwargs: Any) -> Any:
        self._touch()
        return method(self, *args, **kwargs)

    return looked_at


for _name in (
    "__getitem__", "__setitem__", "__delitem__", "__iter__", "keys", "get", "items", "values", "pop", "popitem",
    "clear", "setdefault", "update",
):  # fmt: skip
    setattr(_Watched, _name, _saying_so(_name))
