"""Which samples a step sees, and how a worker loads those of its own shards."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.core.errors import ConfigError
from evenstep.data.streams import Streamed, stream

if TYPE_CHECKING:
    from evenstep.data.tables import Parquet, parquet

__all__ = ["Parquet", "Streamed", "parquet", "stream"]


def __getattr__(name: str) -> Any:
    """Import what needs pyarrow on first use."""
    if name not in ("Parquet", "parquet"):
        raise AttributeError(f"module 'evenstep.data' has no attribute {name!r}")
    try:
        return getattr(import_module("evenstep.data.tables"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyarrow":
            raise
        raise ConfigError(
            "Parquet files need pyarrow, which is not installed: pip install 'evenstep[parquet]'"
        ) from error
