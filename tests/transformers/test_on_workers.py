"""What the page's script does not show, on several workers: one result for any number of them, and when one dies."""

import hashlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from evenstep.transformers import Trainer
from models import Texts, Uneven, adapted, arguments, causal, classifier, masked, padded, random_masks, weights
from workers import cli_run, run_workers

NUM_SAMPLES = 44


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


class Bare(Texts):
    """Without labels: the collator makes them."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": super().__getitem__(index)["input_ids"]}


class Stream(torch.utils.data.IterableDataset):
    """Texts without an index."""

    def __iter__(self) -> Any:
        return iter([Texts(NUM_SAMPLES)[index] for index in range(NUM_SAMPLES)])


def everything(folder: Path) -> dict[str, Any]:
    """All that is tried, by its name."""
    warnings.simplefilter("ignore")  # theirs
    found: dict[str, Any] = {}
    groups = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2}
    grouped = Trainer(
        causal(0.1), arguments(folder, **groups, num_train_epochs=2), data_collator=padded,
        train_dataset=Uneven(NUM_SAMPLES), shards=4,
    )  # fmt: skip
    grouped.train()
    found["grouped"] = weights(grouped.model), grouped.state.total_flos
    bare = Trainer(
        masked(0.1), arguments(folder, dataloader_num_workers=1), data_collator=random_masks(),
        train_dataset=Bare(NUM_SAMPLES), eval_dataset=Bare(20), shards=4,
    )  # fmt: skip
    bare.train()
    found["masked"] = weights(bare.model), bare.evaluate()["eval_loss"]

    def classes(name: str) -> Trainer:
        saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
        args = arguments(folder / name, **saving, num_train_epochs=2, lr_scheduler_type="constant")
        data = {"train_dataset": Texts(NUM_SAMPLES, "kinds"), "eval_dataset": Texts(30, "kinds")}
        return Trainer(classifier(0.1), args, **data, compute_metrics=accuracy, shards=4)

    straight = classes("straight")
    straight.train()
    found["classes"] = weights(straight.model), straight.evaluate()["eval_accuracy"]
    stopped, rest = classes("stopped"), classes("stopped")
    stopped.args.max_steps = 6  # of 8, in the middle of the second epoch
    stopped.train()
    rest.train(resume_from_checkpoint=True)  # which is rotated away
    found["resumed"] = weights(rest.model), sorted(path.name for path in (folder / "stopped").iterdir())
    adapters = Trainer(adapted(), arguments(folder), train_dataset=Texts(NUM_SAMPLES), shards=4)
    adapters.train()
    adapters.save_model(str(folder / "adapter"))
    found["adapters"] = weights(adapters.model), (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    streamed = Trainer(causal(0.1), arguments(folder, max_steps=5), train_dataset=Stream(), shards=4)
    streamed.train()
    found["streamed"] = weights(streamed.model), streamed.evaluate(Stream())["eval_loss"]
    return found


def test_one_two_and_three_workers_come_to_the_same(tmp_path):
    (alone,), *others = (
        run_workers(workers, lambda _, workers=workers: everything(tmp_path / str(workers))) for workers in (1, 2, 3)
    )
    assert alone["resumed"][0] == alone["classes"][0], "as if it had never stopped"
    assert alone["resumed"][1] == ["checkpoint-8"]
    for several in others:
        assert several == [alone] * len(several)
    text = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import test_on_workers
print("found", test_on_workers.digest(Path({str(tmp_path / "killed")!r})))
"""
    (tmp_path / "train.py").write_text(text)
    deaths = [Fault("kill", "after commit", visit, worker=worker) for visit, worker in ((25, 0), (70, 1))]
    killed = cli_run("run", "-n", "3", tmp_path / "train.py", variables=plant(deaths, tmp_path / "faults"))
    assert killed.code == 0, killed.stderr
    assert struck(tmp_path / "faults") == [0, 1]
    said = {line.partition("found ")[2] for line in killed.stdout.splitlines() if "found " in line}
    assert said == {hashlib.sha256(repr(alone).encode()).hexdigest()}


def digest(folder: Path) -> str:
    """Of everything."""
    return hashlib.sha256(repr(everything(folder)).encode()).hexdigest()
