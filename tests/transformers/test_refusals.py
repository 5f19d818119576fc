"""What cannot be had exactly is refused with a sentence, before it is trained or where it is met."""

import warnings
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from transformers import TrainerCallback

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.transformers import Trainer
from models import Texts, arguments, causal, random_masks


@pytest.fixture(autouse=True)
def theirs():
    """What transformers warns of is its own."""
    with warnings.catch_warnings(action="ignore"):
        yield


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"bf16_full_eval": True}, "cast it before: model.bfloat16"),
    ({"auto_find_batch_size": True}, "undoes steps; if memory is short, use more shards"),
    ({"enable_jit_checkpoint": True}, "waits for a signal; save_steps"),
    ({"optim": "schedule_free_adamw"}, "optim='schedule_free_adamw'.* changes parameters outside steps"),
    (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "goes backward inside",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), OPTIONS)
def test_an_argument_that_cannot_be_had_exactly_is_refused(options, sentence, tmp_path):
    with pytest.raises(UnsupportedError, match=sentence):
        Trainer(causal(), arguments(tmp_path, **options), train_dataset=Texts(12))


class Early(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


class Averaging(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average = AveragedModel(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average.update_parameters(model)


class Looking(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs["input_ids"].sum()
        return super().training_step(model, inputs, num_items_in_batch)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return (Texts(24)[index] for index in range(24))


def test_what_a_trainer_is_given_and_cannot_be_had_exactly_is_refused(tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(UnsupportedError, match="Early has an on_pre_optimizer_step"):
        Trainer(causal(), args, train_dataset=Texts(12), callbacks=[Early()]).train()
    with pytest.raises(
        UnsupportedError, match=r"callback Averaging changes self\.average, which follows the parameters"
    ):
        Trainer(causal(), args, train_dataset=Texts(36), callbacks=[Averaging()]).train()
    with pytest.raises(UnsupportedError, match="the inputs are asked for 'input_ids'"):
        Looking(causal(), args, train_dataset=Texts(12)).train()
    collator = random_masks()
    collator.seed = 3
    with pytest.raises(UnsupportedError, match=r"DataCollatorForLanguageModeling\(seed=3\) draws from a generator"):
        Trainer(causal(), args, train_dataset=Texts(12), data_collator=collator).train()
    twice = arguments(tmp_path, gradient_accumulation_steps=2, max_steps=2)
    with pytest.raises(UnsupportedError, match="gradient_accumulation_steps=2 with data that have no index"):
        Trainer(causal(), twice, train_dataset=Stream()).train()
    model = causal()
    part = torch.optim.SGD(list(model.parameters())[:2])
    with pytest.raises(UnsupportedError, match=r"needs a gradient but is not in the optimizer.*max_grad_norm=1 limits"):
        Trainer(model, args, train_dataset=Texts(12), optimizers=(part, None)).train()
    with pytest.raises(UnsupportedError, match="a search over hyperparameters"):
        Trainer(causal(), args, train_dataset=Texts(12)).train(trial={"seed": 1})
    with pytest.raises(ConfigError, match=r"there is no run; this works only inside trainer\.train"):
        _ = Trainer(causal(), args, train_dataset=Texts(12)).run


def test_data_without_an_index_are_cut_like_any_other(tmp_path):
    found = []
    for data in (Stream(), Texts(24)):
        options = {"train_sampling_strategy": "sequential"} if isinstance(data, Texts) else {}
        trainer = Trainer(causal(), arguments(tmp_path, max_steps=2, **options), train_dataset=data, shards=4)
        trainer.train()
        found.append([value.tolist() for value in trainer.model.state_dict().values()])
    assert found[0] == found[1]
