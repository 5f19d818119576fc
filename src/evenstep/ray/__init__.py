"""evenstep as a guest of Ray: runs on the nodes of a cluster, and Ray's data sets as training sets.

Needs `pip install 'evenstep[ray]'`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.core.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.ray.cluster import ScriptError, run
    from evenstep.ray.rows import write

__all__ = ["ScriptError", "run", "write"]

_ROOMS = {"ScriptError": "cluster", "run": "cluster", "write": "rows"}


def __getattr__(name: str) -> Any:
    """Import what needs Ray when it is first asked for."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("cloudpickle", "pyarrow", "ray"):
            raise
        raise ConfigError(f"{error.name} is not installed: pip install 'evenstep[ray]'") from error
