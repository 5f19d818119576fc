"""Which of several processes Accelerate takes this one for, and other temporary changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from accelerate.state import AcceleratorState, PartialState

from evenstep.run.run import Run

__all__ = ["Acting", "changed", "once_as_first"]

T = TypeVar("T")


class Acting:
    """Makes this process act as one worker, from now on or, as a context manager, while it is open.

    Args:
        worker: Which one. There is still one world, of one process: only who writes files and logs depends on it.
    """

    def __init__(self, worker: int) -> None:
        self._states = [state._shared_state for state in (PartialState, AcceleratorState) if state._shared_state]
        self._before = [dict(state) for state in self._states]
        for state in self._states:
            state.update(process_index=worker, local_process_index=worker)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for state, before in zip(self._states, self._before, strict=True):
            state.update({name: before[name] for name in ("process_index", "local_process_index") if name in before})


def once_as_first(run: Run, function: Callable[[], T]) -> T:
    """Let one worker do something for all, as the first worker would, whichever it is; see `Run.once`."""

    def act() -> T:
        with Acting(0):
            return function()

    found: T = run.once(act)
    return found


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While this is open, an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
