"""What workers on somebody else's cluster run: a function or a script, as a value that travels with them.

It is given to the process that forks the workers, which holds it in its memory: they have it from there, and no file is
left however they end. Functions travel as the cluster ships them itself, see `shipping`.
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
        function: A call of a function, as `ship` gives it; None: there is a script.
        script: The path of a script, and what it says.
        args: Of the script.
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
        """What is to be run, from what a user says.

        Args:
            what: A function, or the path of a script.
            args: Its arguments.
            options: Keyword arguments of the function.
            working_dir: The script lies there under the same path on all nodes, if it does here.

        Raises:
            ConfigError: There is no such script, it was given options, or the function cannot be shipped.
        """
        if not isinstance(what, str | Path):
            return cls(ship(what, args, options), None, ())
        if not Path(what).is_file():
            raise ConfigError(f"there is no script {what}; name a Python file to run")
        if options:
            raise ConfigError(f"{next(iter(options))}=... is no option of run; a script takes none by name")
        path = Path(what).resolve()
        if working_dir is not None and path.is_relative_to(Path(working_dir).resolve()):
            path = path.relative_to(Path(working_dir).resolve())
        return cls(None, (str(path), Path(what).read_text()), tuple(map(str, args)))

    def pack(self) -> tuple[dict[str, Any], bytes]:
        """What is text of it, and what is not."""
        return {**asdict(self), "function": self.function is not None}, self.function or b""

    @classmethod
    def unpack(cls, text: dict[str, Any], data: bytes) -> "ShippedWork":
        """The inverse of `pack`, also after a way through JSON."""
        script = None if text["script"] is None else (text["script"][0], text["script"][1])
        return cls(data if text["function"] else None, script, tuple(text["args"]))


_held: list[tuple[ShippedWork, int | None]] = []  # by the process that forks workers, and so by each of them


def hold(work: ShippedWork, result_fd: int | None = None) -> None:
    """Let the workers that are forked from this process find what to do, and where worker 0 puts what comes of it."""
    _held[:] = [(work, result_fd)]


def perform(worker: int) -> None:
    """Do it, as one of the workers."""
    __tracebackhide__ = True
    work, result_fd = _held[0]
    if work.script is not None:
        _run_script(*work.script, work.args)
        return
    assert work.function is not None, "it is one of the two"
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
    """Run the script that is here if it says the same, else what it says."""
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
