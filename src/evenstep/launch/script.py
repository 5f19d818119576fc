"""The user's script, run as Python would run it."""

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from evenstep.core.errors import ConfigError

__all__ = ["run_as_main"]


def run_as_main(script: Path | str, args: Sequence[str]) -> None:
    """Run a file as `python FILE` does, or a module (a string) as `python -m MODULE` does.

    Raises:
        ConfigError: There is no such module, or it cannot be run.
        BaseException: Whatever the script raises.
    """
    sys.argv = [str(script), *args]
    if isinstance(script, Path):
        sys.path.insert(0, str(script.resolve().parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.path.insert(0, str(Path.cwd()))
        _check_module(script)
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def _check_module(name: str) -> None:
    found, parent = None, name.rpartition(".")[0]
    if not parent or importlib.util.find_spec(name.partition(".")[0]) is not None:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a package above it imports something that is missing
    if found is None:
        raise ConfigError(f"there is no module {name}; name one that can be imported from here")
    if found.submodule_search_locations is not None and importlib.util.find_spec(f"{name}.__main__") is None:
        raise ConfigError(f"{name} is a package without a __main__ module; name the module in it that trains")
