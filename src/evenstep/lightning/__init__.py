"""The exact mode for PyTorch Lightning: the same weights, bit for bit, on any number of workers.

    import lightning as L
    from evenstep.lightning import Exact

    trainer = L.Trainer(strategy=Exact(shards=8))
    trainer.fit(model, datamodule)

`pip install evenstep[lightning]`; see docs/lightning.md.
"""

from evenstep.core.errors import ConfigError

try:
    import lightning.pytorch  # noqa: F401  # only whether it is there
except ImportError as error:
    raise ConfigError(
        f"evenstep.lightning needs Lightning, which cannot be imported ({error}): pip install 'evenstep[lightning]'"
    ) from error

from evenstep.lightning.strategy import Exact

__all__ = ["Exact"]
