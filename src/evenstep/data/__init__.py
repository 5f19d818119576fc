"""Which samples a step sees, and how a worker loads those of its own shards."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.core.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.data.streams import Streamed, stream
    from evenstep.data.tables import Parquet, parquet

__all__ = ["Parquet", "Streamed", "parquet", "stream"]


_ROOMS = {"Parquet": "tables", "Streamed": "streams", "parquet": "tables", "stream": "streams"}


def __getattr__(name: str) -> Any:
    """Import what needs torch or pyarrow on first use: tasks of a cluster that write rows import this package too."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'evenstep.data' has no attribute {name!r}")
    try:
        return getattr(import_module(f"evenstep.data.{_ROOMS[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise ConfigError(
            "Parquet files need pyarrow, which is not installed: pip install 'evenstep[parquet]'"
        ) from error
