"""`DataParallel` with replicas on one CPU."""

import collections
import copy
import functools
import pickle
import signal
import threading
import time

import pytest
import torch
from torch import nn

from evenstep.core.errors import ConfigError, MismatchError, SilenceError, UnsupportedError
from evenstep.exchange.surroundings import current
from evenstep.nn import DataParallel, SyncBatchNorm1d, add_replication_callbacks, convert_sync_batchnorm

Pair = collections.namedtuple("Pair", ["a", "b"])


class Function(nn.Module):
    """A module that does what it is told."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def parallel(function, num=3, **options):
    module = function if isinstance(function, nn.Module) else Function(function)
    return DataParallel(module, devices=["cpu"] * num, timeout_s=40.0, **options)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double()


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [7, 8])
def test_training_equals_one_device(num, batch):
    plain = network()
    ours = parallel(convert_sync_batchnorm(network()), num)
    generator = torch.Generator().manual_seed(3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, ours)]
    for _ in range(3):
        x, w = (torch.randn(batch, n, generator=generator, dtype=torch.float64) for n in (5, 2))
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            (model(x) * w).sum().backward()
            optimizer.step()
    for a, b in zip(plain.state_dict().values(), ours.module.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_inputs_are_cut_evenly_and_outputs_put_together_again():
    seen = []
    ours = parallel(lambda x: (seen.append(len(x)), x * 2)[1])
    x = torch.randn(8, 2)
    assert torch.equal(ours(x), x * 2)
    assert sorted(seen) == [2, 3, 3]


@pytest.mark.parametrize(("batch", "replicas"), [(1, 1), (2, 2), (0, 1), (3, 3), (9, 3)])
def test_a_small_batch_has_fewer_replicas(batch, replicas):
    layer = SyncBatchNorm1d(4)
    numbers = set()
    ours = parallel(nn.Sequential(Function(lambda x: (numbers.add(threading.get_ident()), x)[1]), layer))
    x = torch.randn(batch, 4)
    if batch == 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            ours(x)
        return
    assert ours(x).shape == x.shape
    assert len(numbers) == replicas


def test_fewer_replicas_then_one_then_more_and_eval_between():
    """Each of these left the older library waiting for ever."""
    layer = SyncBatchNorm1d(4)
    ours = parallel(layer, 4)
    plain = nn.BatchNorm1d(4)
    for batch, training in [(8, True), (2, True), (8, False), (2, True), (8, True), (3, False), (2, True)]:
        x = torch.randn(batch, 4)
        for model in (ours, plain):
            model.train(training)
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_var, plain.running_var)
    single = DataParallel(layer, devices=["cpu"])
    torch.testing.assert_close(single(x), plain(x), rtol=1e-5, atol=1e-5)


def test_containers_and_values_that_are_no_tensors_go_in_and_come_out():
    x, y = torch.arange(6.0), torch.arange(12.0).view(6, 2)

    def function(pair, *, options, scale, flag, scalar):
        assert type(pair) is Pair
        assert flag == "same"
        assert scalar.dim() == 0
        return {
            "pair": Pair(pair.a * scale, [pair.b, None]),
            "tuple": (options["deep"][0] + scalar,),
            "text": flag,
            "loss": pair.a.sum(),
        }

    ours = parallel(function)
    out = ours(Pair(x, y), options=collections.OrderedDict(deep=[y]), scale=2, flag="same", scalar=torch.tensor(1.0))
    assert type(out["pair"]) is Pair
    assert torch.equal(out["pair"].a, x * 2)
    assert torch.equal(out["pair"].b[0], y)
    assert out["pair"].b[1] is None
    assert torch.equal(out["tuple"][0], y + 1)
    assert out["text"] == "same"
    assert out["loss"].tolist() == [1.0, 5.0, 9.0]


def test_no_tensor_at_all_is_one_replica():
    assert parallel(lambda: torch.ones(2))().tolist() == [1.0, 1.0]
    assert parallel(lambda text: text)("abc") == "abc"


def test_another_dimension_can_be_cut():
    x = torch.randn(3, 8)
    ours = parallel(lambda x: x + x.shape[1], dim=1)
    assert torch.equal(ours(x), x + torch.tensor([3.0] * 6 + [2.0] * 2))
    with pytest.raises(ConfigError, match=r"shape \(4,\) and cannot be cut along dim 1"):
        ours(torch.zeros(4))


def test_outputs_that_cannot_be_put_together_are_refused():
    with pytest.raises(UnsupportedError, match=r"the output\['count'\] .* 2 in replica 0, 1 in replica 1"):
        parallel(lambda x: {"count": len(x)}, 2)(torch.zeros(3))
    with pytest.raises(UnsupportedError, match="cannot be put together"):
        parallel(lambda x: x if len(x) == 2 else None, 2)(torch.zeros(3))
    with pytest.raises(UnsupportedError, match="cannot be put together"):
        parallel(lambda x: [x] * len(x), 2)(torch.zeros(3))


def test_gradients_flow_to_inputs_and_shared_parameters():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3)
            self.nest = nn.ModuleDict({"two": self.one, "rnn": nn.GRU(3, 3, batch_first=True)})
            self.tied = self.one.weight

        def forward(self, x):
            assert self.nest["two"] is self.one
            assert self.tied is self.one.weight
            return self.nest["rnn"](self.nest["two"](self.one(x)).unsqueeze(1))[0] + self.tied.sum()

    torch.manual_seed(0)
    plain = Shared()
    ours = parallel(copy.deepcopy(plain))
    inputs = [torch.linspace(-1, 1, 15).view(5, 3).requires_grad_() for _ in range(2)]
    for model, x in zip((plain, ours), inputs, strict=True):
        y = model(x)
        (y * torch.linspace(-1, 2, y.numel()).view(y.shape)).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_buffers_of_replica_0_are_the_modules_own_and_those_of_others_are_not():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))
            self.register_buffer("none", None)

        def forward(self, x):
            self.seen.add_(x.sum())
            return x

    ours = parallel(Counting())
    seen = ours.module.seen
    ours(torch.tensor([1.0, 10.0, 100.0]))
    assert ours.module.seen is seen
    assert seen.item() == 1.0


def test_grad_mode_autocast_and_inference_mode_reach_the_replicas():
    modes = set()

    def function(x):
        modes.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        return x @ x.T

    ours = parallel(function)
    x = torch.randn(3, 3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x).dtype == torch.bfloat16
    assert modes == {(False, True, False)}
    modes.clear()
    with torch.inference_mode():
        ours(x)
    assert modes == {(False, False, True)}
    modes.clear()
    ours(x)
    assert modes == {(True, False, False)}


def fail_in(number, error, wait=lambda: None):
    def function(x):
        if int(x[0]) == number:
            raise error
        wait()
        return x

    return function


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_surfaces_with_the_number_of_its_replica(number):
    cause = ValueError("bad sample")
    with pytest.raises(ValueError, match=f"in replica {number} on cpu: bad sample") as caught:
        parallel(fail_in(number, cause))(torch.arange(3))
    assert caught.value.__cause__ is cause


def test_an_error_whose_class_has_arguments_of_its_own_is_chained_too():
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(a, b)

    with pytest.raises(MismatchError, match="in replica 1 on cpu: Odd"):
        parallel(fail_in(1, Odd(1, 2)))(torch.arange(3))


@pytest.mark.long
def test_an_error_does_not_wait_for_a_slow_replica():
    may_end, ended = threading.Event(), []
    with pytest.raises(ValueError, match="replica 1"):
        parallel(fail_in(1, ValueError("x"), wait=lambda: ended.append(may_end.wait(30.0))))(torch.arange(3))
    assert ended == []
    may_end.set()


def test_a_replica_that_fails_before_the_layer_frees_those_that_wait_in_it():
    model = nn.Sequential(
        Function(fail_in(1, torch.OutOfMemoryError("out of memory"))),
        nn.Flatten(0),
        Function(lambda x: x.view(-1, 1).float()),
        SyncBatchNorm1d(1),
    )
    begin = time.monotonic()
    with pytest.raises(torch.OutOfMemoryError, match="in replica 1 on cpu: out of memory"):
        parallel(model)(torch.arange(3))
    assert time.monotonic() - begin < 20.0


class Branching(nn.Module):
    """Calls its layer as often as it is told for each replica."""

    def __init__(self, counts):
        super().__init__()
        self.counts, self.norm = counts, SyncBatchNorm1d(2)

    def forward(self, x):
        for _ in range(self.counts[int(x[0, 0])]):
            self.norm(x)
        return x


@pytest.mark.parametrize(("counts", "missing"), [((1, 0), 1), ((0, 1), 0), ((2, 1), 1), ((1, 2), 0)])
def test_a_replica_that_skips_a_call_is_named_with_layer_and_call(counts, missing):
    ours = parallel(convert_sync_batchnorm(Branching(counts)), 2)
    x = torch.arange(2.0).view(2, 1).expand(2, 2)
    with pytest.raises(MismatchError) as caught:
        ours(x)
    assert f"replica {missing} ended after" in str(caught.value)
    assert f"never came to 'norm call {max(counts) - 1}'" in str(caught.value)
    ours.module.counts = (1, 1)
    assert torch.equal(ours(x), x), "the next forward is as good as new"


def test_replicas_at_different_layers_are_named():
    class Crossing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)

        def forward(self, x):
            return self.a(x) if x[0, 0] == 0 else self.b(x)

    with pytest.raises(MismatchError, match=r"is at '[ab] call 0' but replica [01] is at '[ab] call 0'"):
        parallel(convert_sync_batchnorm(Crossing()), 2)(torch.arange(2.0).view(2, 1).expand(2, 2))


def test_a_replica_that_does_not_come_within_the_timeout_is_named():
    release = threading.Event()
    layer = SyncBatchNorm1d(2)
    layer.qualified_name = "trunk.norm"

    def function(x):
        if x[0, 0] == 1:
            release.wait(40.0)
            return x
        try:
            return layer(x)
        finally:
            release.set()

    ours = DataParallel(Function(function), devices=["cpu", "cpu"], timeout_s=0.3)
    with pytest.raises(SilenceError, match=r"replica 1 .* did not come to 'trunk.norm call 0' within 0.3 s"):
        ours(torch.arange(2.0).view(2, 1).expand(2, 2))


def test_ctrl_c_ends_the_forward():
    layer = SyncBatchNorm1d(2)
    main, freed, ended = threading.main_thread().ident, threading.Event(), []

    def function(x):
        try:
            if x[0, 0] == 1:
                signal.pthread_kill(main, signal.SIGINT)
                ended.append(freed.wait(20.0))  # the other waits for this one, until it is told not to
            return layer(x)
        finally:
            freed.set()

    with pytest.raises(KeyboardInterrupt):
        parallel(function, 2)(torch.arange(2.0).view(2, 1).expand(2, 2))
    assert ended == [True]


class Called(nn.Module):
    """Notes how it was called back."""

    log: list = []  # noqa: RUF012  # shared by all copies on purpose

    def __init__(self, name):
        super().__init__()
        self.name = name

    def __data_parallel_replicate__(self, context, replica_number):
        if replica_number == 0:
            context.made_by = self.name
        assert context.made_by == self.name
        self.number = replica_number
        self.log.append((replica_number, self.name, id(context), context.num_replicas))

    def forward(self, x):
        return x * 0 + self.number


def test_callbacks_run_on_every_replica_with_a_shared_context_and_replica_0_first():
    Called.log.clear()
    inner = Called("inner")
    ours = parallel(nn.Sequential(Called("outer"), nn.Sequential(inner, inner)))
    assert ours(torch.zeros(3)).tolist() == [0.0, 1.0, 2.0]
    assert not hasattr(inner, "number"), "it is a replica that is called"
    assert [(n, name, num) for n, name, _, num in Called.log] == [
        (n, name, 3) for n in range(3) for name in ("outer", "inner")
    ]
    contexts = {(name, context) for _, name, context, _ in Called.log}
    assert len(contexts) == 2
    ours(torch.zeros(1))
    assert Called.log[-1][3] == 1


class OnCpu(nn.DataParallel):
    """torch's class with replicas on the CPU, which torch itself cannot have."""

    def __init__(self, module, num):
        super().__init__(module)
        self.device_ids, self.output_device, self.dim = [torch.device("cpu")] * num, torch.device("cpu"), 0
        self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs, kwargs, device_ids):
        parts = [(p,) for p in inputs[0].chunk(len(device_ids))]
        return tuple(parts), tuple(kwargs for _ in parts)

    def replicate(self, module, device_ids):
        return [copy.copy(module) if n == 0 else copy.deepcopy(module) for n in range(len(device_ids))]

    def gather(self, outputs, output_device):
        return torch.cat(outputs)


def test_an_existing_data_parallel_of_torch_gets_callbacks_and_synchronizes():
    Called.log.clear()
    torch.manual_seed(0)
    model = OnCpu(nn.Sequential(nn.BatchNorm1d(3), Called("x")), 2)
    assert add_replication_callbacks(add_replication_callbacks(model)) is model
    convert_sync_batchnorm(model)
    x = torch.randn(6, 3)
    plain = nn.BatchNorm1d(3)
    model(x)
    plain(x)
    assert [n for n, *_ in Called.log] == [0, 1], "twice is once"
    torch.testing.assert_close(model.module[0].running_var, plain.running_var)
    assert int(model.module[0].num_batches_tracked) == 1
    model.module[1] = Function(lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="in replica 0 on cpu"):
        model(x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_it_can_be_copied_and_pickled_after_a_forward(duplicate):
    ours = DataParallel(convert_sync_batchnorm(network()), devices=["cpu", "cpu"], dim=0, timeout_s=7.0)
    x = torch.randn(4, 5, dtype=torch.float64)
    ours(x)
    twin = duplicate(ours)
    assert torch.equal(twin.eval()(x), ours.eval()(x))
    twin.train()(x)
    assert twin.rendezvous.timeout_s == 7.0


def test_several_threads_may_run_it_at_once():
    ours = parallel(convert_sync_batchnorm(network()), 2)
    x = torch.randn(4, 5, dtype=torch.float64)
    results = []
    threads = [threading.Thread(target=lambda: results.append(ours(x).shape)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(4, 2)] * 4


def test_outside_of_a_replica_there_are_no_surroundings():
    inside = []
    parallel(lambda x: (inside.append(current()), x)[1], 2)(torch.zeros(2))
    assert all(inside)
    assert current() is None


def test_misuse_is_named():
    with pytest.raises(ConfigError, match="at least one"):
        DataParallel(nn.Linear(1, 1), devices=[])
    with pytest.raises(UnsupportedError, match="call the lazy module once"):
        parallel(nn.LazyLinear(2))(torch.zeros(3, 1))
    model = DataParallel(nn.Linear(1, 1), devices=["cpu"])
    model.module.to("meta")
    with pytest.raises(UnsupportedError, match="'weight' is on meta, expected cpu"):
        model(torch.zeros(3, 1))


def test_a_differentiable_copy_goes_to_other_devices():
    """The meta device stands for a second one: shapes and the graph are real there, values are not."""
    layer = nn.Linear(2, 2)
    from evenstep.nn.data_parallel import _replicate

    replica = _replicate(nn.Sequential(layer), [torch.device("cpu"), torch.device("meta")])[1]
    assert replica[0].weight.device.type == "meta"
    assert replica[0].weight.grad_fn is not None
    assert functools.reduce(lambda n, p: n + 1, replica.parameters(), 0) == 2
