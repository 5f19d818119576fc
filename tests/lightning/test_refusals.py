"""What cannot be had exactly is refused with a sentence, before it is trained or where it is met."""

import copy
import warnings
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from modules import Classifier, loader, trainer
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric, Metric
from torchmetrics.wrappers import Running

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.lightning import Exact


class Manual(Classifier):
    automatic_optimization = False


class Silent(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Counting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        return self.loss(batch)


class Meter:
    """The mean of what it is given, as half of all training scripts have one."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


class Keeping(Classifier):
    """Keeps something of every batch in an attribute that other workers do not see."""

    kept: Any

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.begin()

    def begin(self) -> Any:
        raise NotImplementedError

    def keep(self, loss: torch.Tensor, batch: Any) -> None:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.keep(loss.detach(), batch)
        return loss


class InTensor(Keeping):
    def begin(self) -> Any:
        return torch.zeros(())

    def keep(self, loss: torch.Tensor, batch: Any) -> None:
        self.kept += loss


class InDeque(Keeping):
    def begin(self) -> Any:
        return deque([1.0, 2.0, 3.0], maxlen=3)

    def keep(self, loss: torch.Tensor, batch: Any) -> None:
        self.kept.append(float(loss))


class InArray(Keeping):
    def begin(self) -> Any:
        return np.zeros(3)

    def keep(self, loss: torch.Tensor, batch: Any) -> None:
        self.kept += np.bincount(batch[1].numpy(), minlength=3)


class InMeter(Keeping):
    def begin(self) -> Any:
        return Meter()

    def keep(self, loss: torch.Tensor, batch: Any) -> None:
        self.kept.update(float(loss))


class InUnregisteredMetric(Keeping):
    def begin(self) -> Any:
        return {"mean": MeanMetric()}

    def keep(self, loss: torch.Tensor, batch: Any) -> None:
        self.kept["mean"].update(loss)


class Popping(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [1, 2]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.pop()
        return self.loss(batch)


class Fickle(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) == 2:
            self.log("two", 2.0)
        return self.loss(batch)


class Gathering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.all_gather(self.loss(batch)).mean()


class Drawing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"size": len(batch[0])})
        return self.loss(batch)


class Looking(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        print(batch[0].shape)


class Asking(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "logits": self(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["logits"].sum()


class Impatient(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.step()


class Clipping(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Watching(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pass


class Averaged(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, x: torch.Tensor) -> None:
        self.mean = x.mean()

    def compute(self) -> torch.Tensor:
        return self.mean


class Measuring(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.mean = Averaged()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.update(batch[0])
        return self.loss(batch)


class Averaging(Callback):
    """Keeps an average of the parameters, in one of the ways in which people do."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        copied = copy.deepcopy(pl_module.net)
        self.kept = copied if self.kind != "dict" else dict(copied.named_parameters())
        if self.kind == "prepared":
            trainer.strategy.run.prepare(copied)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            if self.kind == "dict":
                self.kept = {name: 0.9 * self.kept[name] + 0.1 * p for name, p in pl_module.net.named_parameters()}
            elif self.kind == "module":
                self.update(pl_module)
            elif self.kind == "prepared":
                trainer.strategy.run.edit(lambda: self.update(pl_module))

    def update(self, pl_module: Any) -> None:
        for mine, theirs in zip(self.kept.parameters(), pl_module.net.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


class Windowed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.recent = Running(MeanMetric(), window=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.recent.update(loss.detach())
        return loss


MODULES: dict[type[Classifier], str] = {
    Manual: "has automatic_optimization=False.* return the loss",
    Silent: "returned a NoneType; expected the loss",
    Counting: r"changes self.seen \(from 0 to 3\), which other workers would not see",
    InTensor: r"changes self\.kept",
    InDeque: r"changes self\.kept",
    InArray: r"changes self\.kept",
    InMeter: r"changes self\.kept",
    InUnregisteredMetric: r"changes self\.kept .* a torchmetrics metric that is an attribute, or in a ModuleDict",
    Popping: "changes the list self.kept other than by appending",
    Fickle: r"logs \['two'\] in one part of a batch and \[\] in another",
    Gathering: "all_gather inside a step.* use self.trainer.strategy.run.gather",
    Looking: "a hook looks into the batch.* len\\(batch\\)",
    Asking: "'logits' of what training_step returned was asked for its sum",
    Impatient: "called its closure by itself.* expected optimizer.step",
    Clipping: "Clipping has a configure_gradient_clipping.* instead: Trainer",
    Windowed: r"metric self.recent \(Running\) keeps something in its _num_vals_seen, which is none of its states",
    Measuring: r"metric self.mean \(Averaged\) has a state 'mean' that is neither",
}
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"val_check_interval": {"minutes": 1}}, "which each worker has by its own clock"),
    ({"num_nodes": 2}, "num_nodes=2.* use `evenstep run`"),
    ({"callbacks": StochasticWeightAveraging(0.1)}, "StochasticWeightAveraging has no exact equivalent.* run.edit"),
    ({"callbacks": GradientAccumulationScheduler({1: 2})}, "GradientAccumulationScheduler has no exact .* batch_size"),
    ({"callbacks": LearningRateFinder()}, "LearningRateFinder has no exact equivalent"),
    ({"callbacks": Watching()}, "Watching has a on_after_backward.* in the middle of a step"),
]


@pytest.fixture(autouse=True)
def theirs():
    """What Lightning warns of is its own."""
    with warnings.catch_warnings(action="ignore"):
        yield


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_cannot_be_had_exactly_is_refused(module, tmp_path):
    with pytest.raises(UnsupportedError, match=f"(?s){MODULES[module]}"):
        trainer(tmp_path, strategy=Exact(shards=4)).fit(module(), loader(batch_size=11), loader())


def test_the_logger_itself_is_refused_inside_of_a_step(tmp_path):
    with pytest.raises(UnsupportedError, match=r"training_step asks the logger for its log_metrics.* use self\.log"):
        trainer(tmp_path, strategy=Exact(shards=4), logger=CSVLogger(tmp_path)).fit(Drawing(), loader())


@pytest.mark.parametrize(("options", "sentence"), OPTIONS)
def test_an_option_that_cannot_be_had_exactly_is_refused(options, sentence, tmp_path):
    with pytest.raises(UnsupportedError, match=f"(?s){sentence}"):
        trainer(tmp_path, strategy=Exact(shards=4), **options).fit(Classifier(), loader(), loader())


@pytest.mark.parametrize("kind", ["module", "dict"])
def test_a_callback_that_follows_the_parameters_is_refused(kind, tmp_path):
    with pytest.raises(UnsupportedError, match=r"callback Averaging changes self\.kept, which follows the"):
        trainer(tmp_path, strategy=Exact(shards=2), callbacks=Averaging(kind)).fit(Classifier(), loader())


@pytest.mark.parametrize("kind", ["teacher", "prepared"])
def test_a_callback_may_keep_a_copy_that_stays_as_it_is_or_is_prepared(kind, tmp_path):
    trainer(tmp_path, strategy=Exact(shards=2), callbacks=Averaging(kind), max_steps=3).fit(Classifier(), loader())


def test_loaders_that_cannot_be_had_exactly_are_refused(tmp_path):
    data = loader().dataset
    shared = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match="is a BatchSampler, which deals samples to ranks"):
        trainer(tmp_path, strategy=Exact()).fit(Classifier(), DataLoader(data, 4, sampler=shared))
    with pytest.raises(UnsupportedError, match="several DataLoaders at once give one batch"):
        trainer(tmp_path, strategy=Exact()).fit(Classifier(), {"a": loader(), "b": loader()})
    with pytest.raises(UnsupportedError, match="has a worker_init_fn; expected none"):
        trainer(tmp_path, strategy=Exact()).fit(Classifier(), loader(num_workers=1, worker_init_fn=print))
    with pytest.raises(UnsupportedError, match=r"accumulate_grad_batches=2\) with data that have no index"):
        trainer(tmp_path, strategy=Exact(), accumulate_grad_batches=2).fit(Classifier(), [next(iter(loader()))])


def test_a_failed_module_is_an_ordinary_one_again(tmp_path):
    module = Counting()
    with pytest.raises(UnsupportedError):
        trainer(tmp_path, strategy=Exact(shards=4)).fit(module, loader())
    trainer(tmp_path).fit(module, loader())
    assert module.seen > 0
