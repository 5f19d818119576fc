"""Which tests `make quick` runs: those that start no process, and neither compute nor wait for seconds.

Whether a test starts processes is read off its code: it, or a helper or fixture that it uses, names something that
does.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

_HERE = Path(__file__).parent
_STARTERS = {
    "Fleet", "Popen", "Process", "cli_run", "fork", "multiprocessing", "posix_spawn", "run_main", "run_outcomes",
    "run_workers", "script_run", "servers", "spawn", "start_processes", "subprocess",
}  # fmt: skip


def is_foreign(path: Path) -> bool:
    """Whether a path is the folder of a framework or an engine, which takes seconds to import."""
    return path.parent == _HERE and path.name in ("agents", "lightning", "ray", "spark", "transformers")


def is_quick(item: pytest.Item) -> bool:
    """Whether a test belongs to `make quick`."""
    if item.get_closest_marker("long") or not isinstance(item, pytest.Function):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(each.func for found in fixtures for each in found)]
    return not any(map(_starts_any, functions))


@cache  # many tests use the same fixtures
def _starts_any(function: Callable[..., Any]) -> bool:
    return _starts_processes(function, set())


def _starts_processes(function: Callable[..., Any], seen: set[Any]) -> bool:
    code = getattr(function, "__code__", None)
    if code is None or code in seen or not code.co_filename.startswith(f"{_HERE}/"):
        return False
    seen.add(code)
    names = set(_names(code))
    if names & _STARTERS:
        return True
    known = function.__globals__ if isinstance(function, FunctionType) else {}
    return any(_starts_processes(each, seen) for name in names for each in _called(known.get(name), names))


def _called(found: Any, names: set[str]) -> Iterator[Callable[..., Any]]:
    """The functions that a name stands for: itself, those of a class, or those of a module that are named too."""
    if isinstance(found, FunctionType):
        yield found
    elif isinstance(found, type):
        yield from (each for each in vars(found).values() if isinstance(each, FunctionType))
    elif isinstance(found, ModuleType):
        yield from (each for name, each in vars(found).items() if name in names and isinstance(each, FunctionType))
    else:
        inner = getattr(found, "__wrapped__", None)
        if inner is not None:
            yield from _called(inner, names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
        elif isinstance(each, tuple):
            yield from (name for name in each if isinstance(name, str))
