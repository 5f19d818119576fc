"""evenstep as a guest of Spark: runs on executors, a `pyspark.ml` estimator, and models trained on RDDs.

Needs `pip install 'evenstep[spark]'`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenstep.core.errors import ConfigError

if TYPE_CHECKING:
    from evenstep.spark.estimator import Estimator
    from evenstep.spark.model import Model
    from evenstep.spark.spark_model import SparkModel, load_spark_model
    from evenstep.spark.stage import ScriptError, run

__all__ = ["Estimator", "Model", "ScriptError", "SparkModel", "load_spark_model", "run"]

_ROOMS = {
    "Estimator": "estimator",
    "Model": "model",
    "ScriptError": "stage",
    "SparkModel": "spark_model",
    "load_spark_model": "spark_model",
    "run": "stage",
}


def __getattr__(name: str) -> Any:
    """Import what needs Spark when it is first asked for."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("cloudpickle", "pandas", "py4j", "pyarrow", "pyspark"):
            raise
        raise ConfigError(f"{error.name} is not installed: pip install 'evenstep[spark]'") from error
