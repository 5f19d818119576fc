"""What workers on a foreign cluster run: a function or a script, as a value that can be sent to their nodes.

The process that forks the workers holds it in memory and they inherit it, so no file is left behind however they end.
Functions travel as the cluster's own functions do; see `shipping`.
"""

import linecache
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from evenstep.agents.shipping import ship
from evenstep.core.errors import ConfigError
from evenstep.launch.script import run_as_main

__all__ = ["MODULE", "ShippedWork", "hold", "perform"]

MODULE = "evenstep.agents.worker"
"""What a worker runs as its script."""


@dataclass(frozen=True)
class ShippedWork:
    """What every worker runs.

    Attributes:
        function: A function call as `ship` encodes it; None: there is a script.
        script: The path of a script, and its text.
        args: The arguments of the script.
    """

    function: bytes | None
    script: tuple[str, str] | None
    args: tuple[str, ...]

    @classmethod
    def of(
        cls,
        what: Callable[..., Any] | str | Path,
        args: tuple[Any, ...],
        options: dict[str, Any],
        working_dir: str | None = None,
    ) -> "ShippedWork":
        """The work that a user asks for.

        Args:
            what: A function, or the path of a script.
            args: Its arguments.
            options: Keyword arguments of the function.
            working_dir: A directory in which the workers of every node run; a script inside it is named relative to it.

        Raises:
            ConfigError: There is no such script, it was given keyword arguments, or the function cannot be shipped.
        """
        if not isinstance(what, str | Path):
            return cls(ship(what, args, options), None, ())
        if not Path(what).is_file():
            raise ConfigError(f"there is no script {what}; name a Python file to run")
        if options:
            raise ConfigError(f"run() has no option {next(iter(options))}, and a script takes no keyword arguments")
        path = Path(what).resolve()
        if working_dir is not None and path.is_relative_to(Path(working_dir).resolve()):
            path = path.relative_to(Path(working_dir).resolve())
        return cls(None, (str(path), Path(what).read_text()), tuple(map(str, args)))

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """The parts that JSON can hold, and the bytes that it cannot."""
        return {**asdict(self), "function": self.function is not None}, self.function or b""

    @classmethod
    def unpack(cls, text: dict[str, Any], data: bytes) -> "ShippedWork":
        """The inverse of `pack`, even after a round trip through JSON."""
        script = None if text["script"] is None else (text["script"][0], text["script"][1])
        return cls(data if text["function"] else None, script, tuple(text["args"]))


_held: list[tuple[ShippedWork, int | None]] = []  # held by the process that forks workers, inherited by each of them


def hold(work: ShippedWork, result_fd: int | None = None) -> None:
    """Say what workers forked from this process run, and where worker 0 writes its result."""
    _held[:] = [(work, result_fd)]


def perform(worker: int) -> None:
    """Do the work that is held, as one of the workers."""
    __tracebackhide__ = True
    work, result_fd = _held[0]
    if work.script is not None:
        _run_script(*work.script, work.args)
        return
    assert work.function is not None, "work is either a script or a function"
    function, args, options = pickle.loads(work.function)
    result = function(*args, **options)
    if worker == 0 and result_fd is not None:
        Path(f"/proc/{os.getppid()}/fd/{result_fd}").write_bytes(_packed(result))


def _packed(result: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise ConfigError(
            f"the function returned a {type(result).__name__} that cannot be shipped: {error}; return plain values"
        ) from error


def _run_script(path: str, text: str, args: tuple[str, ...]) -> None:
    """Run the script at `path` if this node has it with the same text, otherwise the text that was sent."""
    __tracebackhide__ = True
    here = Path(path)
    if here.is_file() and here.read_text() == text:
        run_as_main(here, args)
        return
    sys.argv = [path, *args]
    sys.path.insert(0, str(here.resolve().parent))
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # for tracebacks
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(text, path, "exec"), main.__dict__)
