"""Against plain transformers: the same bits with one shard, and the same up to rounding with several."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import EarlyStoppingCallback, TrainerCallback

from evenstep.core.errors import UnsupportedError
from evenstep.transformers import Seq2SeqTrainer, Trainer
from models import LETTERS, Texts, Uneven, adapted, arguments, causal, classifier, masked, padded, weights

NUM_SAMPLES = 44  # 12, 12, 12 and 8: parts of different sizes


@pytest.fixture(autouse=True)
def theirs():
    """What transformers and torch warn of is their own."""
    with warnings.catch_warnings(action="ignore"):
        yield


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def weighted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of somebody's own."""
    total = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return 0.5 * total / num_items_in_batch


class Watching(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, round(state.epoch, 6), kwargs["lr_scheduler"].get_last_lr()))


Case = tuple[Callable[[], nn.Module], str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "causal": (causal, "causal", {}, {}),
    "masked": (masked, "masked", {"warmup_steps": 3, "lr_scheduler_type": "cosine"}, {}),
    "classes": (classifier, "kinds", {"eval_strategy": "epoch", "max_grad_norm": 0.1}, {"compute_metrics": accuracy}),
    "no clipping": (causal, "causal", {"max_grad_norm": 0.0, "max_steps": 5}, {}),
    "bf16": (causal, "causal", {"bf16": True}, {}),
    "adapters": (adapted, "causal", {"learning_rate": 0.05}, {}),
    "smooth labels": (causal, "causal", {"label_smoothing_factor": 0.1}, {}),
    "a loss of one's own": (causal, "causal", {}, {"compute_loss_func": weighted}),
    "sgd and a plateau": (
        causal,
        "causal",
        {
            "optim": "sgd",
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "epoch",
            "metric_for_best_model": "loss",
            "num_train_epochs": 3,
        },
        {},
    ),
    "tokens": (causal, "causal", {"include_num_input_tokens_seen": "all", "dataloader_drop_last": True}, {}),
}


def train(kind: Any, case: str, folder: Path, **shards: int) -> tuple[Any, list[dict[str, Any]], list[Any]]:
    """A trained model, what was logged of its training without times, and what callbacks saw."""
    make, data, options, more = CASES[case]
    watching = Watching()
    trainer = kind(
        make(), arguments(folder, **options), train_dataset=Texts(NUM_SAMPLES, data), eval_dataset=Texts(30, data),
        callbacks=[watching], **more, **shards,
    )  # fmt: skip
    trainer.train()
    clock = ("runtime", "per_second", "preparation")
    logged = [{k: v for k, v in each.items() if not any(t in k for t in clock)} for each in trainer.state.log_history]
    return trainer, logged, watching.seen


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_does_alone_it_does_with_one_shard(case, tmp_path):
    plain, logged, seen = train(transformers.Trainer, case, tmp_path)
    exact, merged, saw = train(Trainer, case, tmp_path, shards=1)
    assert merged == logged
    assert saw == seen
    assert weights(exact.model) == weights(plain.model)
    several, merged, saw = train(Trainer, case, tmp_path, shards=5)
    assert saw == seen
    near = 0.05 if case == "bf16" else 2e-3
    for name, value in several.model.state_dict().items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=near, atol=near)
    assert [pytest.approx(each, rel=near, abs=near) for each in merged] == logged


def test_accumulating_is_a_larger_batch_to_the_bit(tmp_path):
    found = []
    for size, times in ((12, 1), (4, 3)):
        args = arguments(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=times)
        trainer = Trainer(causal(), args, train_dataset=Texts(NUM_SAMPLES), shards=8)
        trainer.train()
        assert trainer.state.global_step == 4
        found.append(weights(trainer.model))
    assert found[0] == found[1]
    plain = transformers.Trainer(causal(), args, train_dataset=Texts(NUM_SAMPLES))
    plain.train()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=1e-3, atol=1e-4)


def logging(kind: Any) -> Any:
    class Logging(kind):  # type: ignore[misc]  # one of two
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            self.log({"mine": float(loss.detach()), "twice": 2 * loss.detach()})
            return (loss, outputs) if return_outputs else loss

    return Logging


def test_what_compute_loss_logs_is_logged_once(tmp_path):
    def logged(kind: Any, **more: Any) -> list[dict[str, Any]]:
        args = arguments(tmp_path, eval_strategy="epoch", include_num_input_tokens_seen="all")
        trainer = logging(kind)(causal(), args, train_dataset=Texts(30), eval_dataset=Texts(14), **more)
        trainer.train()
        return [
            {key: float(value) for key, value in each.items()} for each in trainer.state.log_history if "mine" in each
        ]

    expected = logged(transformers.Trainer)
    assert len(expected) == 5  # three steps, and two batches of evaluation
    assert logged(Trainer, shards=1) == expected
    assert logged(Trainer, shards=5) == [pytest.approx(each, rel=1e-5) for each in expected]


def test_what_compute_loss_logs_must_be_numbers_and_the_same_for_every_part(tmp_path):
    def train(values: Any) -> None:
        class Logging(Trainer):
            def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
                self.log(values(inputs))
                return super().compute_loss(model, inputs, **more)

        Logging(causal(), arguments(tmp_path), train_dataset=Texts(6), shards=3).train()

    with pytest.raises(UnsupportedError, match="compute_loss logs 'rows', which is a list; expected a number"):
        train(lambda inputs: {"rows": inputs["input_ids"].tolist()})
    with pytest.raises(UnsupportedError, match="expected the same for every part"):
        train(lambda inputs: {f"of {int(inputs['input_ids'].sum())}": 1.0})


def test_evaluating_and_predicting_see_every_sample_once(tmp_path):
    def made(kind: Any, **more: Any) -> Any:
        args = arguments(tmp_path, include_for_metrics=["inputs"])
        return kind(causal(), args, data_collator=padded, compute_metrics=shapes, **more)

    def shapes(prediction: Any) -> dict[str, float]:
        return {"rows": len(prediction.predictions), "sum": float(prediction.inputs[prediction.inputs > 0].sum())}

    plain, exact = made(transformers.Trainer), made(Trainer, shards=8)
    data = Uneven(NUM_SAMPLES)
    expected, found = (each.evaluate(data) for each in (plain, exact))
    for name in ("eval_loss", "eval_rows", "eval_sum"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    expected, found = (each.predict(data) for each in (plain, exact))
    assert found.predictions.shape == (NUM_SAMPLES, 8, LETTERS)
    real = found.predictions != -100
    np.testing.assert_allclose(found.predictions[real], expected.predictions[real], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)


def test_one_checkpoint_goes_on_anywhere(tmp_path):
    def made(kind: Any, folder: str, **more: Any) -> Any:
        args = arguments(tmp_path / folder, save_strategy="steps", save_steps=3, num_train_epochs=3)
        return kind(causal(), args, train_dataset=Texts(NUM_SAMPLES), **more)

    straight = made(Trainer, "ours", shards=1)
    straight.train()
    plain = made(transformers.Trainer, "theirs")
    plain.train()
    assert weights(plain.model) == weights(straight.model)
    for kind, more in ((Trainer, {"shards": 1}), (transformers.Trainer, {})):
        for folder in ("ours", "theirs"):
            resumed = made(kind, "again", **more)
            resumed.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-6"))  # 4 are an epoch
            assert weights(resumed.model) == weights(straight.model)
    loaded = type(straight.model).from_pretrained(tmp_path / "ours" / "checkpoint-12")
    assert weights(loaded) == weights(straight.model)
    other = made(Trainer, "again", shards=2)
    with pytest.warns(UserWarning, match="written with shards=1 but this run has shards=2"):
        other.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-6"))


def test_the_best_model_is_loaded_in_the_end(tmp_path):
    best = {}
    for kind, more in ((transformers.Trainer, {}), (Trainer, {"shards": 1})):
        args = arguments(
            tmp_path / kind.__module__, save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True,
            save_total_limit=1, num_train_epochs=6, learning_rate=0.5, max_grad_norm=0.0,
        )  # fmt: skip
        data = {"train_dataset": Texts(NUM_SAMPLES), "eval_dataset": Texts(30), "callbacks": [EarlyStoppingCallback(2)]}
        trainer = kind(causal(), args, **data, **more)
        trainer.train()
        folders = sorted(path.name for path in (tmp_path / kind.__module__).glob("checkpoint-*"))
        best[kind] = weights(trainer.model), trainer.state.global_step, trainer.state.best_global_step, folders
    assert best[Trainer] == best[transformers.Trainer]
    assert best[Trainer][2] < best[Trainer][1], "there was something to be loaded"


def test_what_a_model_generates_is_put_together_from_the_parts(tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": LETTERS}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, bos_token_id=0)
    )
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, per_device_eval_batch_size=5, predict_with_generate=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    data = Texts(7)
    expected = transformers.Seq2SeqTrainer(model, args).predict(data, max_length=4)
    found = Seq2SeqTrainer(model, args, shards=3).predict(data, max_length=4)
    assert np.array_equal(found.predictions, expected.predictions)
    assert np.array_equal(found.label_ids, expected.label_ids)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)
