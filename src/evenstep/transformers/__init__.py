"""The exact mode for Hugging Face transformers: the same weights, bit for bit, on any number of workers.

    from evenstep.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=dataset, shards=8)
    trainer.train()

`pip install evenstep[transformers]`; see docs/transformers.md.
"""

from evenstep.core.errors import ConfigError

try:
    import accelerate  # noqa: F401  # only whether they are there
    import transformers  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"evenstep.transformers needs transformers and accelerate, which cannot be imported ({error}): "
        "pip install 'evenstep[transformers]'"
    ) from error

from evenstep.transformers.seq2seq import Seq2SeqTrainer
from evenstep.transformers.trainer import Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]
