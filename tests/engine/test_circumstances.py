"""A step is done under the same circumstances by everyone, also by those who run the script again later."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.core.errors import MismatchError
from evenstep.engine.circumstances import compare_past, digests
from workers import run_outcomes

BATCH = torch.ones(8, 4), torch.arange(8) % 3


class Script:
    """A script in small steps, which can be run again."""

    def __init__(self, run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        self.run, self.beside = run, copy.deepcopy(model)
        self.model, self.optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def loss(self, part):
        self.during()
        with torch.no_grad():
            aim = self.beside(part[0])
        return F.cross_entropy(self.model(part[0]), part[1]) + F.mse_loss(self.model(part[0]), aim)

    def during(self):
        pass

    def between(self):
        pass

    def go_on(self, steps):
        for _ in range(steps):
            self.run.step(BATCH, self.loss)
            self.between()


def validated(script):
    with torch.no_grad():
        script.optimizer.param_groups[0]["lr"] = 0.1 * float(script.model[0].weight.norm())


def followed(script):
    script.beside.load_state_dict(script.model.state_dict())


def followed_through_data(script):
    for mine, theirs in zip(script.beside.parameters(), script.model.parameters(), strict=True):
        mine.data.lerp_(theirs.data, 0.5)


def frozen(script):
    script.model[0].requires_grad_(False)


def left_in_eval_mode(script):
    script.model.eval()


CHANGES = {
    (validated, "between"): "options",
    (followed, "between"): "attribute 'beside' of its Script",
    (followed_through_data, "between"): "attribute 'beside' of its Script",
    (frozen, "during"): "frozen parameters",
    (left_in_eval_mode, "during"): "layers in eval mode",
}


@pytest.mark.parametrize(("change", "when"), CHANGES)
def test_a_resumed_run_that_comes_to_other_circumstances_is_refused(change, when, tmp_path):
    def run_it(steps):
        with evenstep.Run(shards=4, quiet=True) as run:
            script = Script(run)
            setattr(script, when, lambda: change(script))
            run.checkpoint(tmp_path, every=1, resume=True)
            script.go_on(steps)

    run_it(3)
    with pytest.raises(MismatchError, match=rf"step 1 was done with {CHANGES[change, when]} other than now.*run\.edit"):
        run_it(4)


@pytest.mark.parametrize("kind", ["evaluate", "predict"])
def test_a_resumed_run_that_evaluates_another_average_is_refused(kind, tmp_path):
    def run_it(steps):
        with evenstep.Run(shards=4, quiet=True) as run:
            script = Script(run)
            average = copy.deepcopy(script.model)
            run.checkpoint(tmp_path, every=1, resume=True)
            data = torch.utils.data.TensorDataset(*BATCH)
            for _ in range(steps):
                run.step(BATCH, lambda part: F.cross_entropy(script.model(part[0]), part[1]))
                for mine, theirs in zip(average.parameters(), script.model.parameters(), strict=True):
                    mine.data.lerp_(theirs.data, 0.5)
                if kind == "evaluate":
                    run.evaluate(data, 4, lambda part: {"loss": F.cross_entropy(average(part[0]), part[1])})
                else:
                    run.predict(data, 4, lambda part: average(part[0]))

    run_it(3)
    with pytest.raises(MismatchError, match=rf"{kind} 1 was done with variable 'average' other than now"):
        run_it(4)


def test_options_that_are_no_number_are_the_same_again(tmp_path):
    for steps in (2, 3):
        with evenstep.Run(shards=4, quiet=True) as run:
            script = Script(run)
            script.optimizer.param_groups[0] |= {"weight_decay": math.nan}
            run.checkpoint(tmp_path, every=1, resume=True)
            script.go_on(steps)


def test_workers_with_other_tensors_beside_the_model_are_told():
    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            script = Script(run)
            with torch.no_grad():
                script.beside[0].bias.add_(worker)
            script.go_on(1)

    for outcome in run_outcomes(2, body):
        assert outcome.kind == "MismatchError"
        assert "worker 1 has attribute 'beside' of its Script" in outcome.text
        assert "prepared too" in outcome.text


def test_every_shard_begins_in_the_modes_that_the_step_began_in():
    """An evaluation at the end of a step function, as `model.train()` before each step allows it in plain torch."""

    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            script = Script(run)

            def loss(part):
                assert script.model.training
                found = script.loss(part)
                script.model.eval()
                return found

            for _ in range(3):
                script.model.train()
                run.step(BATCH, loss)
            return run.fingerprint()

    assert len({outcome.value for n in (1, 2, 3) for outcome in run_outcomes(n, body)}) == 1


def test_facts_that_the_journal_lacks_are_not_compared():
    facts = {"options": [{"lr": 0.1}], "scale": None}
    compare_past("step 3", {}, facts)
    compare_past("step 3", digests(facts), facts)
    with pytest.raises(MismatchError, match=r"step 3 was done with options other than now \(\[\{'lr': 0.2"):
        compare_past("step 3", digests(facts), {**facts, "options": [{"lr": 0.2}]})
