"""Whatever goes wrong is said clearly, to everyone."""

import gc
import os
import signal
import time
import warnings
import weakref
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import images
from torch import nn

import evenstep
import processes
from workers import cli_run, run_outcomes


def prepare(run, model):
    return run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))[0]


def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 4))


def step(run, model, fn=None):
    return run.step(images(16).tensors, fn or (lambda part: F.cross_entropy(model(part[0]), part[1])))


def test_workers_at_different_layers_get_an_error_that_names_both():
    class Model(nn.Module):
        def __init__(self, swap):
            super().__init__()
            self.a, self.b, self.swap = nn.BatchNorm2d(3), nn.BatchNorm2d(3), swap

        def forward(self, x):
            first, second = (self.b, self.a) if self.swap else (self.a, self.b)
            return second(first(x)).mean((2, 3))

    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = prepare(run, Model(swap=worker == 1))
            step(run, model)

    outcomes = run_outcomes(2, body)
    assert {o.kind for o in outcomes} <= {"MismatchError", "PeerError"}
    for outcome in outcomes:
        assert "step 0: a call 0 forward" in outcome.text
        assert "step 0: b call 0 forward" in outcome.text


def test_a_shard_that_skips_a_layer_is_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.out = nn.BatchNorm2d(3), nn.Linear(3, 4)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.out((x if self.calls == 3 else self.bn(x)).mean((2, 3)))

    with evenstep.Run(shards=4, quiet=True) as run:
        model = prepare(run, Model())
        with pytest.raises(evenstep.MismatchError, match=r"shard 2 ended .* never came to 'step 0: bn call 0'"):
            step(run, model)


def test_an_exception_in_one_shard_reaches_all_workers_with_its_place_and_traceback():
    def body(worker):
        with evenstep.Run(shards=6, quiet=True) as run:
            model = prepare(run, nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4)))

            def function(part):
                out = model(part[0])
                if worker == 1 and part[1][0] == marked:
                    raise KeyError("a bad sample")
                return F.cross_entropy(out, part[1])

            marked = images(24).tensors[1][12]  # the first sample of shard 3, the second of worker 1's
            run.step(images(24).tensors, function)

    outcomes = run_outcomes(3, body)
    assert [o.kind for o in outcomes] == ["PeerError", "KeyError", "PeerError"]
    for outcome in outcomes:
        assert "a bad sample" in outcome.text
        assert "in function" in outcome.text
        assert "in shard" in outcome.text
        assert "worker 1, step 0" in outcome.text


@pytest.mark.parametrize("how", ["exit", "kill", "stop"])
def test_a_worker_that_is_lost_or_silent_is_named_by_all_others(how):
    def body(worker):
        with evenstep.Run(shards=6, quiet=True, timeout_s=4.0 if how == "stop" else 60.0) as run:
            model = prepare(run, flat())
            step(run, model)
            if worker == 2:
                victim, others = os.getpid(), _children(os.getppid()) - {os.getpid(), *strangers}
                if how == "stop" and os.fork() == 0:  # wakes it up again when the others have given it up
                    while os.getppid() == victim and any(map(processes.is_alive, others)):
                        time.sleep(0.05)
                    os.kill(victim, signal.SIGKILL)
                    os._exit(0)
                os._exit(0) if how == "exit" else os.kill(victim, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            step(run, model)

    strangers = _children(os.getpid())
    outcomes = run_outcomes(3, body)
    for outcome in outcomes[:2]:
        assert outcome.kind in ("PeerError", "SilenceError")
        assert "worker 2" in outcome.text
        assert "its last exchange was 'step 0: committed'" in outcome.text
        assert ("said nothing for 4 s" if how == "stop" else "ended while") in outcome.text


def _children(pid):
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_unsupported_things_are_refused_before_training():
    refusals = {
        "sparse=False": (nn.Embedding(4, 2, sparse=True), torch.optim.SGD),
        "closure": (nn.Linear(2, 2), torch.optim.LBFGS),
        "Adam": (nn.Linear(2, 2), torch.optim.SparseAdam),
        "bare model": (nn.DataParallel(nn.Linear(2, 2)), torch.optim.SGD),
        "lazy model once": (nn.LazyLinear(2), None),
        "torch.nn.Module": ("a string", None),
    }
    for text, (model, optimizer) in refusals.items():
        with evenstep.Run(quiet=True) as run, pytest.raises(evenstep.UnsupportedError, match=text):  # noqa: PT012
            if optimizer is None:
                run.prepare(model)
            else:
                run.prepare(model, optimizer(model.parameters(), 0.1))


def test_a_parameter_outside_of_the_model_is_refused():
    with evenstep.Run(quiet=True) as run:
        model, lone = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
        with pytest.raises(evenstep.UnsupportedError, match=r"shape \(3,\) that is in no prepared model"):
            run.prepare(model, torch.optim.SGD([*model.parameters(), lone], 0.1))


def test_a_sparse_gradient_is_refused_at_the_step_that_meets_it():
    with evenstep.Run(quiet=True) as run:
        model = prepare(run, nn.Embedding(4, 2))
        with pytest.raises(evenstep.UnsupportedError, match=r"'model.weight' got a sparse gradient"):
            run.step(torch.zeros(8, dtype=torch.long), lambda part: F.embedding(part, model.weight, sparse=True).sum())


def test_a_buffer_that_changes_its_shape_is_refused():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(108, 4)
            self.register_buffer("cache", torch.zeros(1))

        def forward(self, x):
            self.cache = torch.zeros(len(self.cache) + 1)
            return self.linear(x.flatten(1))

    with evenstep.Run(quiet=True) as run:
        model = prepare(run, Growing())
        with pytest.raises(evenstep.UnsupportedError, match=r"buffer 'model.cache' from \(1,\)"):
            step(run, model)
        assert model.cache.shape == (1,)


def test_a_parameter_reached_outside_of_the_model_is_refused_beside_batch_norm():
    with evenstep.Run(quiet=True) as run:
        model = prepare(run, nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4)))
        kept = list(model.parameters())
        with pytest.raises(evenstep.UnsupportedError, match="through a reference kept outside"):
            step(run, model, lambda part: F.cross_entropy(model(part[0]), part[1]) + sum(p.sum() for p in kept))


def test_mistakes_in_a_step_are_said_in_a_sentence():
    with evenstep.Run(quiet=True) as run:
        with pytest.raises(evenstep.ConfigError, match="no optimizer was prepared"):
            run.step(torch.zeros(8, 2), lambda part: part.sum())
        model = prepare(run, flat())
        other = prepare(run, nn.Linear(2, 2))
        assert other is not None
        with pytest.raises(evenstep.ConfigError, match="2 optimizers were prepared; say which one"):
            step(run, model)
    with evenstep.Run(quiet=True) as run:
        model = prepare(run, flat())
        with pytest.raises(evenstep.ConfigError, match="was not prepared"):
            run.step(images(8).tensors, lambda part: part[0].sum(), optimizer=torch.optim.SGD(flat().parameters(), 1.0))
        for wrong in (lambda part: model(part[0]), lambda part: 3.0, lambda part: (model(part[0]).sum(), "x")):
            with pytest.raises(evenstep.ConfigError, match="expected the mean loss of its part"):
                step(run, model, wrong)
        with pytest.raises(evenstep.ConfigError, match="has 3 values for a part of 2 samples"):
            step(run, model, lambda part: (model(part[0]).mean(), {"m": torch.zeros(3)}))
        with pytest.raises(evenstep.ConfigError, match="no tensor, array or list with samples"):
            run.step({"a": 3}, lambda part: part)


def test_what_the_bits_rest_on_is_watched():
    with evenstep.Run(quiet=True) as run:
        model = prepare(run, flat())
        torch.set_num_threads(2)
        with pytest.raises(evenstep.NondeterminismError, match=r"get_num_threads\(\) is 2 but the run began with 1"):
            step(run, model)
        torch.set_num_threads(1)
        step(run, model)
    with evenstep.Run(quiet=True, on_nondeterminism="warn") as run:
        model = prepare(run, flat())
        torch.set_num_threads(2)
        with pytest.warns(UserWarning, match="get_num_threads"):
            step(run, model)
        torch.set_num_threads(1)


def test_different_initial_weights_are_said_once():
    def body(worker):
        with evenstep.Run(shards=2, quiet=True) as run, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(worker)
            prepare(run, flat())
            return [str(w.message) for w in caught], run.fingerprint()

    (first, fingerprint), (second, other) = [o.value for o in run_outcomes(2, body)]
    assert len(first) == 1
    assert "different initial weights" in first[0]
    assert second == []
    assert fingerprint == other


def test_another_model_on_another_worker_is_named():
    def body(worker):
        with evenstep.Run(shards=2, quiet=True) as run:
            prepare(run, nn.Linear(2, 3 + worker))

    outcomes = run_outcomes(2, body)
    assert "MismatchError" in {o.kind for o in outcomes}
    assert all("model.weight" in o.text for o in outcomes)


def test_parameters_are_changed_by_edit_only():
    def body(_):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = prepare(run, nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 4)))
            step(run, model)

            def halve():
                torch.rand(3)  # random numbers of an edit are its own
                model[2].weight.mul_(0.5)
                model[0].running_mean.fill_(7.0)

            before = model[2].weight.detach().clone()
            run.edit(halve)
            assert torch.equal(model[2].weight, before * 0.5)
            assert torch.equal(model[0].running_mean, torch.full((3,), 7.0))
            step(run, model)
            return run.fingerprint(), float(torch.rand(()))

    assert len({body(0), *(outcome.value for outcome in run_outcomes(3, body))}) == 1
    with evenstep.Run(shards=4, quiet=True) as run:
        model = prepare(run, flat())
        step(run, model)
        with torch.no_grad():
            model[1].weight.mul_(0.5)
        with pytest.raises(evenstep.NondeterminismError, match=r"'model.1.weight' was changed between steps"):
            step(run, model)


def test_a_parameter_that_is_changed_through_data_between_steps_is_named():
    with evenstep.Run(shards=4, quiet=True) as run:
        model = prepare(run, flat())
        step(run, model)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)  # as of the weights of a Wasserstein critic
        with pytest.raises(evenstep.NondeterminismError, match=r"'model.1.weight' was changed between steps through"):
            step(run, model)


def test_a_parameter_that_the_step_function_changes_is_named():
    with evenstep.Run(shards=4, quiet=True) as run:
        model = prepare(run, flat())

        def function(part):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.99)
            return F.cross_entropy(model(part[0]), part[1])

        with pytest.raises(evenstep.NondeterminismError, match=r"was changed inside the step function.*run\.edit"):
            step(run, model, function)


def test_predict_and_random_numbers_do_not_depend_on_workers_without_samples():
    def body(_):
        with evenstep.Run(shards=4, seed=1, quiet=True) as run:
            model = prepare(run, flat())
            found = run.predict(images(2), 2, lambda part: (model(part[0]), part[1]))
            scores = run.evaluate(images(5), 3, lambda part: {"x": model(part[0]).sum(1)})
            return [t.tolist() for t in found], scores, float(np.random.rand()), float(torch.rand(()))

    alone = body(0)
    assert all(outcome.value == alone for outcome in run_outcomes(3, body))


def differing(*changes):
    """Two workers, of which the second does something else; what each says."""

    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = flat()
            parameters = list(model.parameters())
            options = {
                "lr": 0.1,
                "batch": 16,
                "clip_value": None,
                "reverse": False,
                **(dict(changes) if worker else {}),
            }
            if options["reverse"]:
                parameters.reverse()
            model, optimizer = run.prepare(model, torch.optim.SGD(parameters, 0.1))
            optimizer.param_groups[0]["lr"] = options["lr"]
            batch = [t[: options["batch"]] for t in images(16).tensors]
            run.step(batch, lambda p: F.cross_entropy(model(p[0]), p[1]), clip_value=options["clip_value"])

    return run_outcomes(2, body)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("lr", 0.2), "options"),
        (("batch", 8), "batch"),
        (("clip_value", 1.0), "clipping"),
        (("reverse", True), "optimizer"),
    ],
)
def test_workers_that_do_not_do_the_same_step_are_told_so(change, said):
    outcomes = differing(change)
    assert [o.kind for o in outcomes] == ["MismatchError"] * 2
    assert all("worker 1" in o.text and said in o.text for o in outcomes)


def test_a_forward_of_evaluate_leaves_the_buffers_as_committed():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(108, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.linear(x.flatten(1)) * 0 + self.calls

    def body(_):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = prepare(run, Counting())
            scores = run.evaluate(images(16), 8, lambda part: {"calls": model(part[0]).mean(1)})
            return scores["calls"], float(model.calls)

    assert body(0) == (1.0, 0.0)
    assert all(outcome.value == (1.0, 0.0) for outcome in run_outcomes(2, body))


def test_evaluate_wants_the_same_metrics_from_every_part():
    with evenstep.Run(shards=4, quiet=True) as run:
        prepare(run, flat())
        calls = iter(range(100))
        with pytest.raises(evenstep.ConfigError, match=r"metrics gave \['b'\] in batch 0, shard 2, but \['a'\]"):
            run.evaluate(images(16), 8, lambda part: {"b" if next(calls) == 2 else "a": 1.0})


def test_a_step_function_that_failed_behind_a_batch_norm_keeps_no_memory():
    """Else a notebook would keep the parameters of every run in which a step failed."""

    def failing_run():
        with evenstep.Run(shards=2, quiet=True) as run:
            model = prepare(run, nn.Sequential(nn.BatchNorm2d(3), flat()))

            def function(part):
                loss = F.cross_entropy(model(part[0]), part[1])
                raise KeyError(loss)

            with pytest.raises(KeyError):
                step(run, model, function)
            return weakref.ref(run._engine)

    engine = failing_run()
    for _ in range(3):
        gc.collect()
    assert engine() is None


@pytest.mark.parametrize("make", [flat, lambda: nn.Sequential(nn.BatchNorm2d(3), flat())], ids=["plain", "batch norm"])
def test_backward_inside_of_the_step_function_is_refused(make):
    """Its gradients would be added to ours, without the weight of the part."""
    with evenstep.Run(shards=2, quiet=True) as run:
        model = prepare(run, make())
        before = run.fingerprint()

        def function(part):
            F.cross_entropy(model(part[0]), part[1]).backward()
            return F.cross_entropy(model(part[0]), part[1])

        with pytest.raises(evenstep.ConfigError, match=r"called backward\(\) by itself.*use more shards"):
            step(run, model, function)
        assert run.fingerprint() == before
        step(run, model)
        after = run.fingerprint()
    with evenstep.Run(shards=2, quiet=True) as run:
        model = prepare(run, make())
        step(run, model)
        assert run.fingerprint() == after, "nothing of it is left"


def test_gradients_that_user_code_left_do_not_count():
    def fingerprint(before, between):
        with evenstep.Run(shards=2, quiet=True) as run:
            model = nn.Sequential(nn.BatchNorm2d(3), flat())
            x, y = images(16).tensors
            if before:
                F.cross_entropy(model[1](x), y).backward()
            model = prepare(run, model)
            for _ in range(2):
                step(run, model)
                if between:
                    F.cross_entropy(model[1](x), y).backward()  # without the running statistics
            return run.fingerprint()

    assert fingerprint(before=True, between=True) == fingerprint(before=False, between=False)


def test_a_batch_cannot_be_unpacked_and_says_what_to_do():
    with (
        evenstep.Run(shards=2, quiet=True) as run,
        pytest.raises(evenstep.ConfigError, match=r"cannot be unpacked.*run\.step\(batch, lambda part"),
    ):
        for _, _ in run.batches(images(16), 8):
            pass


def test_a_closed_run_says_that_it_is():
    with evenstep.Run(shards=2, quiet=True) as run:
        model = prepare(run, flat())
    uses = (
        lambda: step(run, model),
        lambda: prepare(run, model),
        lambda: run.edit(lambda: None),
        lambda: run.evaluate(images(16), 8, lambda part: {}),
    )
    for use in uses:
        with pytest.raises(evenstep.ConfigError, match="this run is closed"):
            use()


def test_workers_with_different_batches_are_told_which_tensor_and_why():
    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = prepare(run, flat())
            for _ in range(3):
                if worker == 0 and run.version == 2:
                    torch.rand(1)  # as an evaluation by one worker would
                inputs = torch.randn(8, 108)
                run.step(
                    {"x": inputs, "y": torch.arange(8) % 4}, lambda part: F.cross_entropy(model(part["x"]), part["y"])
                )

    for outcome in run_outcomes(3, body):
        assert outcome.kind in ("MismatchError", "PeerError")
        assert (
            "in step 2 worker 1 came with another batch than worker 0: batch['x'] is float32 (8, 108)" in outcome.text
        )
        assert "if run.worker == 0: evaluate()" in outcome.text


def test_a_worker_that_catches_up_with_other_batches_is_told_so(script):
    path = script(
        """
        import os, sys, torch, evenstep
        from pathlib import Path
        from torch import nn

        with evenstep.Run(shards=4, quiet=True) as run:
            model = nn.Linear(3, 1)
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            again = Path(sys.argv[1]).exists() and run.worker == 1
            for step in range(6):
                batch = torch.full((4, 3), float(step) + again)
                run.step(batch, lambda part: model(part).square().mean())
                if step == 3 and run.worker == 1 and not again:
                    Path(sys.argv[1]).touch()
                    os.kill(os.getpid(), 9)
        """
    )
    done = cli_run("run", "-n", "2", path, path.parent / "died")
    assert "in step 0 worker 1 came with another batch than worker 0" in done.stderr


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_batch_that_the_step_function_changes_in_place_is_refused(num_workers):
    def body(worker):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = prepare(run, flat())
            step(run, model, lambda part: F.cross_entropy(model(part[0].mul_(2)), part[1]))

    for outcome in run_outcomes(num_workers, body):
        assert outcome.kind in ("UnsupportedError", "PeerError")
        assert "changed the batch in place" in outcome.text


NESTED = {
    "a step": lambda run, model: step(run, model),
    "an evaluation": lambda run, model: run.evaluate(images(8), 8, lambda part: {"one": part[1] * 0 + 1}),
    "once": lambda run, model: run.once(lambda: 1),
}


@pytest.mark.parametrize("inner", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("outer", ["step 0", "once"])
def test_an_operation_inside_another_is_refused(inner, outer):
    with evenstep.Run(shards=4, quiet=True) as run:
        model = prepare(run, flat())

        def both(part=None):
            inner(run, model)
            return None if part is None else F.cross_entropy(model(part[0]), part[1])

        with pytest.raises(evenstep.ConfigError, match=f"was begun inside '{outer}'"):
            run.once(both) if outer == "once" else step(run, model, both)
        step(run, model)  # it is not inside any more


def test_a_part_whose_loss_depends_on_nothing_adds_nothing():
    def body(worker, given):
        with evenstep.Run(shards=4, quiet=True) as run:
            model = prepare(run, flat())

            def loss(part):
                mean = F.cross_entropy(model(part[0]), part[1])
                return mean if run.rows.start == 4 else given(mean)

            step(run, model, loss)
            return run.fingerprint()

    zeros = (lambda mean: torch.tensor(0.0)), (lambda mean: mean * 0)
    found = [o.value for given in zeros for n in (1, 2, 3) for o in run_outcomes(n, partial(body, given=given))]
    assert None not in found
    assert len(set(found)) == 1


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm2d(3)])
def test_a_loss_that_depends_on_nothing_in_any_part_is_refused(norm):
    with evenstep.Run(shards=4, quiet=True) as run:
        model = prepare(run, nn.Sequential(norm, flat()))
        with pytest.raises(evenstep.ConfigError, match=r"no part depends on a parameter that is trained.*detach"):
            step(run, model, lambda part: F.cross_entropy(model(part[0]), part[1]).detach())
        model.requires_grad_(False)  # then it is no surprise
        step(run, model)
