"""`Seq2SeqTrainer`: as `Trainer`, for models that generate what is compared with the labels."""

import transformers

from evenstep.transformers.trainer import Trainer

__all__ = ["Seq2SeqTrainer"]


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """Trains as `Trainer` does, and evaluates and predicts as `transformers.Seq2SeqTrainer` does.

    With `Seq2SeqTrainingArguments(predict_with_generate=True)` every part of a batch generates for its own samples.
    """
