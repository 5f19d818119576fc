"""Against plain Lightning: the same bits with one shard, and the same up to rounding with several."""

import warnings
from typing import Any

import pytest
import torch
from modules import Classifier, L, loader, samples, trainer, weights
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper

from evenstep.lightning import Exact


@pytest.fixture(autouse=True)
def theirs():
    """What Lightning warns of is its own."""
    with warnings.catch_warnings(action="ignore"):
        yield


class ByStep(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"}]


class OnPlateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.3)
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Warmed(Classifier):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = self.lr / (1 + self.trainer.global_step)


class Wrapped(Classifier):
    """Has metrics inside of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.each = ClasswiseWrapper(MulticlassAccuracy(3, average=None))
        self.extremes = MinMaxMetric(MulticlassAccuracy(3))
        self.columns = MultioutputWrapper(MeanMetric(), 3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.each.update(logits, batch[1])
        self.extremes.update(logits, batch[1])
        self.columns.update(logits)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({**self.each.compute(), **self.extremes.compute()})
        self.log_dict({f"column {n}": value for n, value in enumerate(self.columns.compute())})
        for metric in (self.each, self.extremes, self.columns):
            metric.reset()


class Grouped(Classifier):
    def configure_optimizers(self) -> Any:
        groups = [{"params": [p for p in self.parameters() if p.ndim == dims]} for dims in (1, 2)]
        return Adam(groups, lr=self.lr)


class Keeping(Classifier):
    """Uses hooks, lists and what steps return."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.ends: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        self.kept.append(logits.detach()[:, 1])  # of a part with one row it has an odd stride
        self.log("sized", logits.mean(), on_step=False, on_epoch=True, batch_size=len(logits))
        self.log("least", logits.min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log_dict({"most": logits.max()}, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("in all", logits.detach().abs().sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": self.loss(batch), "mean": logits.detach().mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends += [float(outputs["loss"]), float(outputs["mean"])]
        self.log("batches", float(batch_idx), on_step=False, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("spread", torch.cat(self.kept).std())
        self.kept.clear()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        return {"logits": self(batch[0]), "loss": self.loss(batch)}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.ends += [float(outputs["logits"].sum()), float(outputs["loss"])]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 0.5, batch[1]]


CASES: dict[str, tuple[type[Classifier], dict[str, Any]]] = {
    "plain": (Classifier, {}),
    "a scheduler by step": (ByStep, {}),
    "a scheduler on a plateau": (OnPlateau, {"max_epochs": 3}),
    "clipping by norm": (Classifier, {"gradient_clip_val": 0.05}),
    "clipping by norm of groups": (Grouped, {"gradient_clip_val": 0.05}),
    "clipping by value": (Classifier, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "no clipping, said by 0": (Classifier, {"gradient_clip_val": 0}),
    "mixed precision": (Classifier, {"precision": "bf16-mixed"}),
    "half precision": (Classifier, {"precision": "bf16-true"}),
    "double precision": (Classifier, {"precision": "64-true"}),
    "an optimizer_step of its own": (Warmed, {}),
    "hooks, lists and outputs": (Keeping, {}),
    "metrics inside of metrics": (Wrapped, {}),
    "few batches": (Classifier, {"limit_train_batches": 3, "val_check_interval": 2, "max_steps": 5}),
    "a fast run": (Classifier, {"fast_dev_run": 2}),
}
ACCUMULATING = {"accumulate_grad_batches": 2, "max_epochs": 3}


def fit(case: str, folder: Any, strategy: Any) -> tuple[Classifier, dict[str, float]]:
    make, options = CASES[case]
    module, worker = make(), trainer(folder, strategy=strategy, **options)
    worker.fit(module, loader(), loader())
    return module, {name: float(value) for name, value in worker.callback_metrics.items()}


@pytest.mark.parametrize("case", CASES)
def test_what_lightning_does_alone_it_does_with_one_shard(case, tmp_path):
    plain, metrics = fit(case, tmp_path, "auto")
    exact, merged = fit(case, tmp_path, Exact(shards=1))
    assert weights(exact) == weights(plain)
    assert merged == metrics
    assert getattr(exact, "ends", None) == getattr(plain, "ends", None)
    several, merged = fit(case, tmp_path, Exact(shards=5))
    rough = 0.05 if "bf16" in str(CASES[case][1].get("precision")) else 1e-4
    assert getattr(several, "ends", []) == pytest.approx(getattr(plain, "ends", []), rel=rough, abs=rough)
    assert merged == pytest.approx(metrics, rel=rough, abs=rough)
    for name, value in several.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=rough, atol=rough)


def test_gradients_that_accumulate_are_those_of_a_larger_batch(tmp_path):
    class Patient(Keeping):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if len(batch):
                super().on_train_batch_end(outputs, batch, batch_idx // self.trainer.accumulate_grad_batches)
            else:
                assert float(outputs["loss"]) == 0

    found, expected = Patient(), Patient()
    several = trainer(tmp_path, strategy=Exact(shards=5), **ACCUMULATING)
    several.fit(found, loader(shuffle=True), loader())
    one = trainer(tmp_path, strategy=Exact(shards=5), max_epochs=3)
    one.fit(expected, loader(shuffle=True, batch_size=24), loader())
    assert weights(found) == weights(expected)
    assert found.ends == expected.ends
    assert several.callback_metrics == one.callback_metrics
    assert several.global_step == one.global_step == 6


@pytest.mark.parametrize("times", [1, 2])
def test_a_loss_that_is_a_sum_stays_one(times, tmp_path):
    class Summing(ByStep):
        def loss(self, batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.last = float(outputs["loss"])

    plain, one, several = Summing(0.01), Summing(0.01), Summing(0.01)
    options = {"accumulate_grad_batches": times, "gradient_clip_val": 50.0}
    trainer(tmp_path, **options).fit(plain, loader())
    trainer(tmp_path, strategy=Exact(shards=1, reduction="sum"), **options).fit(one, loader())
    trainer(tmp_path, strategy=Exact(shards=5, reduction="sum"), **options).fit(several, loader())
    if times == 1:
        assert weights(one) == weights(plain)
        assert (one.last, several.last) == (plain.last, pytest.approx(plain.last, rel=1e-5))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(several.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_they_accumulate_as_lightning_lets_them(tmp_path):
    options = {**ACCUMULATING, "accumulate_grad_batches": 3, "limit_train_batches": 3, "gradient_clip_val": 0.05}
    plain, exact = ByStep(), ByStep()
    alone, ours = trainer(tmp_path, **options), trainer(tmp_path, strategy=Exact(shards=4), **options)
    alone.fit(plain, loader())
    ours.fit(exact, loader())
    assert ours.global_step == alone.global_step == 3  # batches 0, 1 and 2 of each epoch; the limit ends the group
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(exact.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.callback_metrics["loss_epoch"], alone.callback_metrics["loss_epoch"])


def test_a_checkpoint_in_the_middle_of_accumulating_loses_nothing(tmp_path):
    class Stopping(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1 and batch_idx == 2:  # the first of two
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    straight, resumed = Classifier(), Classifier()
    trainer(tmp_path, strategy=Exact(), callbacks=Stopping(), **ACCUMULATING).fit(straight, loader(shuffle=True))
    rest = trainer(tmp_path, strategy=Exact(), **ACCUMULATING)
    rest.fit(resumed, loader(shuffle=True), ckpt_path=tmp_path / "middle.ckpt")
    assert weights(resumed) == weights(straight)
    assert rest.global_step == 6


def test_validating_testing_and_predicting_see_every_sample_once(tmp_path):
    module = Classifier()
    plain, exact = trainer(tmp_path), trainer(tmp_path, strategy=Exact(shards=8))
    for name in ("validate", "test"):
        (expected,), (found,) = (getattr(each, name)(module, loader(), verbose=False) for each in (plain, exact))
        assert found == pytest.approx(expected, rel=1e-6)
    expected, found = (torch.cat(each.predict(module, loader())) for each in (plain, exact))
    torch.testing.assert_close(found, expected)
    assert len(found) == len(samples())


def test_several_loaders_are_validated_one_after_the_other(tmp_path):
    class Twice(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", self.loss(batch))

    loaders = [loader(), loader(batch_size=5)]
    module = Twice()
    expected = trainer(tmp_path).validate(module, loaders, verbose=False)
    assert trainer(tmp_path, strategy=Exact(shards=1)).validate(module, loaders, verbose=False) == expected
    assert len(expected) == 2


def test_batch_norm_spans_all_shards_as_it_spans_the_batch_elsewhere(tmp_path):
    def normed() -> Classifier:
        torch.manual_seed(0)
        layers = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
        return ByStep(net=nn.Sequential(*layers))

    plain, exact = normed(), normed()
    trainer(tmp_path).fit(plain, loader())
    trainer(tmp_path, strategy=Exact(shards=4)).fit(exact, loader())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(exact.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_an_iterable_data_set_is_cut_like_any_other(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter([samples()[i] for i in range(len(samples()))])

    streamed, indexed = Classifier(), Classifier()
    source = torch.utils.data.DataLoader(Stream(), batch_size=12)
    trainer(tmp_path, strategy=Exact(shards=8)).fit(streamed, source, source)
    trainer(tmp_path, strategy=Exact(shards=8)).fit(indexed, loader(), loader())
    assert weights(streamed) == weights(indexed)


def test_one_checkpoint_goes_on_anywhere(tmp_path):
    def made(strategy: Any, epochs: int, **options: Any) -> L.Trainer:
        return trainer(tmp_path, strategy=strategy, max_epochs=epochs, **options)

    straight, module = Classifier(), Classifier()
    made(Exact(shards=1), 3).fit(straight, loader(), loader())
    first = made(Exact(shards=1), 2)
    first.fit(module, loader(), loader())
    first.save_checkpoint(tmp_path / "two.ckpt")
    for strategy in (Exact(shards=1), "auto"):
        resumed = Classifier()
        made(strategy, 3).fit(resumed, loader(), loader(), ckpt_path=tmp_path / "two.ckpt")
        assert weights(resumed) == weights(straight)
    plainly = made("auto", 2)
    plainly.fit(Classifier(), loader(), loader())
    plainly.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = Classifier()
    made(Exact(shards=1), 3).fit(resumed, loader(), loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert weights(resumed) == weights(straight)
