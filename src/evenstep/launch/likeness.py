"""What must be alike on all machines of a run, checked before a machine is let in."""

import hashlib
import importlib.util
import platform
from pathlib import Path
from typing import Any

import torch

import evenstep
from evenstep.core import env
from evenstep.core.errors import ConfigError

__all__ = ["difference", "likeness"]


def likeness(script: Path | str, shards: int | None) -> dict[str, Any]:
    """What this machine would run, and on what.

    Args:
        script: The script, or the name of a module.
        shards: What the command line or the environment says.

    Raises:
        ConfigError: This machine does not have the script.
    """
    here = env.read()
    return {
        "evenstep": evenstep.__version__,
        "Python": platform.python_version(),
        "torch": f"{torch.__version__} ({torch.version.git_version[:12]})",
        "number of shards": shards if shards is not None else here.shards,
        "arithmetic": here.arithmetic or "native",
        "kind of processor": f"{torch.backends.cpu.get_cpu_capability()} {platform.machine()}",
        **env.kernel_choices(),
        f"script {script} (SHA-256)": _hash_of(script),
    }


def difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """The first thing that differs, as a clause; None: nothing does."""
    for name in [*ours, *theirs]:
        if (there := theirs.get(name)) != (here := ours.get(name)):
            return f"{name} is {_short(there)} there, but {_short(here)} on the head"
    return None


def _short(value: Any) -> str:
    return "not set" if value is None else str(value)[:80]


def _hash_of(script: Path | str) -> str:
    path = script if isinstance(script, Path) else _file_of(script)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ConfigError(
            f"the head runs {path}, which this machine does not have ({error.strerror}); it must be on every machine: "
            "start `evenstep join` in a directory from which it has the same path"
        ) from error


def _file_of(module: str) -> Path:
    for name in (module, f"{module}.__main__"):  # looking up the second imports the first, which must be a package
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is not None and spec.origin is not None and spec.submodule_search_locations is None:
            return Path(spec.origin)
    raise ConfigError(f"the head runs the module {module}, which this machine does not have; install it here too")
