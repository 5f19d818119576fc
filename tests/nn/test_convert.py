"""Conversion keeps everything, and `revert` brings back an equal model."""

import collections
import copy
import io
import pickle

import pytest
import spans
import torch
from torch import nn
from torch.nn import BatchNorm2d as ImportedEarly

from evenstep.core.errors import ConfigError, UnsupportedError
from evenstep.nn import (
    DataParallel,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    add_replication_callbacks,
    convert_sync_batchnorm,
    patch_batchnorm,
    revert_sync_batchnorm,
)

KINDS = [(nn.BatchNorm1d, SyncBatchNorm1d), (nn.BatchNorm2d, SyncBatchNorm2d), (nn.BatchNorm3d, SyncBatchNorm3d)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, eps=1e-3, momentum=None)
        self.again = self.norm
        self.layers = nn.ModuleList([nn.Sequential(nn.BatchNorm2d(4, affine=False)), nn.ReLU()])
        self.table = nn.ModuleDict({"flat": nn.BatchNorm1d(4, track_running_stats=False), "deep": nn.BatchNorm3d(2)})

    def forward(self, x):
        return self.table["flat"](self.again(self.norm(self.convolution(x))).mean((2, 3)))


class Own(nn.BatchNorm2d):
    """A layer of a user's own."""


def picture(model):
    """All that a model is: classes, attributes and tensors by identity."""
    return [
        (
            name,
            type(module),
            {k: id(v) for k, v in module.__dict__.items() if not k.startswith("_")},
            {k: id(v) for k, v in (*module._parameters.items(), *module._buffers.items())},
            {k: id(v) for k, v in module._modules.items()},
            {k: list(v) for k, v in module.__dict__.items() if isinstance(v, collections.OrderedDict) and "hook" in k},
            set(module.__dict__),
        )
        for name, module in model.named_modules(remove_duplicate=False)
    ]


@pytest.mark.parametrize(("plain", "synchronized"), KINDS)
def test_a_layer_becomes_the_synchronized_one_and_stays_itself(plain, synchronized):
    layer = plain(3)
    assert convert_sync_batchnorm(layer) is layer
    assert type(layer) is synchronized
    assert isinstance(layer, plain), "code that looks for torch's class still finds it"
    assert type(revert_sync_batchnorm(layer)) is plain


def test_conversion_keeps_everything_and_revert_brings_it_back():
    model = Block()
    model.norm.weight.requires_grad_(False)
    model.norm.num_batches_tracked.fill_(7)
    model.norm.eval()
    model.norm.remark = ["of the user"]
    model.norm.register_forward_hook(lambda *_: None)
    model.norm.double()
    before, state = picture(model), copy.deepcopy(model.state_dict())
    convert_sync_batchnorm(model)
    assert model.again is model.norm
    assert type(model.norm) is SyncBatchNorm2d
    assert type(model.layers[0][0]) is SyncBatchNorm2d
    assert (type(model.table["flat"]), type(model.table["deep"])) == (SyncBatchNorm1d, SyncBatchNorm3d)
    for old, new in zip(before, picture(model), strict=True):
        assert old[0] == new[0]
        assert old[2].items() <= new[2].items(), "attributes keep their identity"
        assert old[3:6] == new[3:6], "tensors, modules and hooks keep theirs"
    norm = model.norm
    assert (norm.training, norm.eps, norm.momentum, norm.remark) == (False, 1e-3, None, ["of the user"])
    assert (norm.weight.requires_grad, norm.weight.dtype, int(norm.num_batches_tracked)) == (False, torch.float64, 7)
    assert model.table["flat"].track_running_stats is False
    assert model.layers[0][0].affine is False
    spans.assert_same_bytes(model.state_dict(), state)
    assert picture(revert_sync_batchnorm(model)) == before


def test_optimizers_stay_valid():
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_sync_batchnorm(model)
    before = model.norm.weight.detach().clone()
    model(torch.randn(4, 3, 5, 5)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.norm.weight, before)


def test_layers_learn_their_names():
    model = convert_sync_batchnorm(nn.Sequential(Block(), nn.BatchNorm1d(4)))
    names = {n: m.qualified_name for n, m in model.named_modules() if isinstance(m, SyncBatchNorm)}
    assert names == {n: n for n in ("0.norm", "0.layers.0.0", "0.table.flat", "0.table.deep", "1")}


def test_converted_layers_keep_what_they_have_and_take_what_is_given():
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), eps_mode="clamp")
    assert convert_sync_batchnorm(model)[0].eps_mode == "clamp"
    assert convert_sync_batchnorm(model, eps_mode="plus")[0].eps_mode == "plus"
    built = convert_sync_batchnorm(nn.Sequential(SyncBatchNorm2d(3, eps_mode="clamp")))
    assert (built[0].eps_mode, built[0].qualified_name) == ("clamp", "0")
    assert type(revert_sync_batchnorm(built)[0]) is nn.BatchNorm2d


def test_torchs_synchronized_layer_is_converted_and_comes_back():
    model = nn.Sequential(nn.SyncBatchNorm(3, eps=1e-2))
    before = picture(model)
    convert_sync_batchnorm(model)
    assert type(model[0]) is SyncBatchNorm
    for shape in ((4, 3), (4, 3, 2), (4, 3, 2, 2), (4, 3, 2, 2, 2)):
        assert model(torch.randn(shape)).shape == shape
    assert picture(revert_sync_batchnorm(model)) == before
    assert model[0].process_group is None


def test_a_process_group_survives_conversion_copies_and_revert(tmp_path):
    def body(rank):
        group, other = (torch.distributed.new_group([0, 1]) for _ in range(2))
        layer = nn.SyncBatchNorm(3, process_group=group)
        convert_sync_batchnorm(layer)
        assert layer.process_group is group
        assert copy.deepcopy(layer).process_group is group
        convert_sync_batchnorm(layer, process_group=other)
        assert layer.process_group is other
        pickled = pickle.loads(pickle.dumps(layer))
        with pytest.raises(UnsupportedError, match=r"convert_sync_batchnorm\(model, process_group=...\)"):
            pickled(torch.randn(4, 3))
        assert pickled.eval()(torch.randn(4, 3)).shape == (4, 3)
        convert_sync_batchnorm(pickled.train(), process_group=group)(torch.randn(4, 3))
        revert_sync_batchnorm(layer)
        return layer.process_group is group

    assert spans.run_ranks(2, body, tmp_path) == [True, True]


@pytest.mark.parametrize(
    ("lazy", "plain", "synchronized", "shape"),
    [
        (nn.LazyBatchNorm1d, nn.BatchNorm1d, SyncBatchNorm1d, (2, 3)),
        (nn.LazyBatchNorm2d, nn.BatchNorm2d, SyncBatchNorm2d, (2, 3, 4, 4)),
        (nn.LazyBatchNorm3d, nn.BatchNorm3d, SyncBatchNorm3d, (2, 3, 4, 4, 4)),
    ],
)
def test_lazy_layers_synchronize_from_their_first_input_on(lazy, plain, synchronized, shape, tmp_path):
    model = convert_sync_batchnorm(nn.Sequential(lazy(momentum=1.0)), eps_mode="clamp")
    untouched = nn.Sequential(lazy())
    before = picture(untouched)
    assert picture(revert_sync_batchnorm(convert_sync_batchnorm(untouched))) == before

    def body(rank):
        generator = torch.Generator().manual_seed(5)
        parts = [torch.randn(shape, generator=generator) for _ in range(2)]
        model(parts[rank])
        assert type(model[0]) is synchronized
        assert (model[0].eps_mode, model[0].qualified_name) == ("clamp", "0")
        torch.testing.assert_close(model[0].running_mean, torch.cat(parts).movedim(1, 0).reshape(3, -1).mean(1))
        return type(revert_sync_batchnorm(model)[0]) is plain and set(model[0].__dict__) == set(plain(3).__dict__)

    assert spans.run_ranks(2, body, tmp_path) == [True, True]


@pytest.mark.parametrize("model", [Block, lambda: nn.Sequential(nn.SyncBatchNorm(4))])
def test_state_dicts_load_both_ways(model):
    plain, converted = model(), convert_sync_batchnorm(model())
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor)
        else:
            tensor.fill_(len(name))
    converted.load_state_dict(plain.state_dict())
    spans.assert_same_bytes(converted.state_dict(), plain.state_dict())
    other = model()
    other.load_state_dict(converted.state_dict())
    spans.assert_same_bytes(other.state_dict(), plain.state_dict())
    file = io.BytesIO()
    torch.save(converted.state_dict(), file)
    file.seek(0)
    spans.assert_same_bytes(torch.load(file, weights_only=True), plain.state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_converted_model_can_be_copied_and_pickled(duplicate):
    model = convert_sync_batchnorm(Block(), eps_mode="clamp")
    DataParallel(model, devices=["cpu", "cpu"])(torch.randn(4, 3, 5, 5))
    twin = duplicate(model)
    assert twin.again is twin.norm
    assert (type(twin.norm), twin.norm.eps_mode, twin.norm.qualified_name) == (SyncBatchNorm2d, "clamp", "norm")
    spans.assert_same_bytes(twin.state_dict(), model.state_dict())
    DataParallel(twin, devices=["cpu", "cpu"])(torch.randn(4, 3, 5, 5))
    assert [type(m) for m in revert_sync_batchnorm(twin).modules()] == [type(m) for m in Block().modules()]


def test_torchs_data_parallel_keeps_its_settings_and_gets_the_callbacks():
    model = nn.Sequential(nn.DataParallel(nn.BatchNorm1d(3)))
    parallel = model[0]
    parallel.device_ids, parallel.output_device, parallel.dim = [1, 0], 1, 2
    before = picture(model)
    convert_sync_batchnorm(convert_sync_batchnorm(model))
    assert model[0] is parallel
    assert type(parallel) is nn.DataParallel
    assert (parallel.device_ids, parallel.output_device, parallel.dim) == ([1, 0], 1, 2)
    assert type(parallel.module) is SyncBatchNorm1d
    assert parallel.replicate.func.__module__.startswith("evenstep.")
    pickle.loads(pickle.dumps(model))
    assert copy.deepcopy(model)[0].replicate.args[0] is not parallel
    assert picture(revert_sync_batchnorm(model)) == before


def test_only_a_data_parallel_can_get_callbacks():
    with pytest.raises(ConfigError, match=r"expected a torch.nn.DataParallel, got a Linear"):
        add_replication_callbacks(nn.Linear(1, 1))


def test_nothing_is_converted_by_half():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    before = picture(model)
    with pytest.raises(ValueError, match="eps_mode is 'minus', expected 'plus'"):
        convert_sync_batchnorm(model, eps_mode="minus")
    assert picture(model) == before
    model = nn.Sequential(SyncBatchNorm1d(3), nn.ModuleDict({"odd": SyncBatchNorm(3)}))
    before = picture(model)
    with pytest.raises(UnsupportedError, match=r"layer '1.odd' was built as SyncBatchNorm"):
        revert_sync_batchnorm(model)
    assert picture(model) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_layer_is_refused_before_anything_is_converted():
    model = nn.Sequential(nn.BatchNorm1d(3), torch.jit.script(nn.Sequential(nn.BatchNorm1d(3))))
    with pytest.raises(UnsupportedError, match=r"layer '1.0' was compiled by TorchScript"):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


def test_layers_that_are_built_inside_the_patch_are_synchronized():
    with patch_batchnorm(eps_mode="clamp"):
        model = nn.Sequential(nn.BatchNorm1d(3), ImportedEarly(4, eps=1e-2), nn.LazyBatchNorm3d(), Own(3))
        assert isinstance(model[0], nn.BatchNorm1d)
    assert [type(m) for m in model[:2]] == [SyncBatchNorm1d, SyncBatchNorm2d]
    assert model[2].cls_to_become is SyncBatchNorm3d
    assert type(model[3]) is Own
    assert (model[1].eps, model[1].eps_mode) == (1e-2, "clamp")
    assert type(nn.BatchNorm2d(4)) is nn.BatchNorm2d
    assert [type(m) for m in revert_sync_batchnorm(model)] == [nn.BatchNorm1d, nn.BatchNorm2d, nn.LazyBatchNorm3d, Own]


def test_the_patch_is_undone_by_an_error_and_can_be_nested():
    before = [vars(kind).get("__init__") for kind, _ in KINDS]
    with pytest.raises(ZeroDivisionError), patch_batchnorm():
        1 / 0  # noqa: B018  # the error
    with patch_batchnorm(eps_mode="clamp"):
        with patch_batchnorm():
            inner = nn.BatchNorm1d(3)
        outer = nn.BatchNorm1d(3)
    assert (inner.eps_mode, outer.eps_mode) == ("plus", "clamp")
    assert [vars(kind).get("__init__") for kind, _ in KINDS] == before
    with pytest.raises(ValueError, match="eps_mode"), patch_batchnorm(eps_mode="minus"):
        pass
