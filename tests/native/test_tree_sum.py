"""The tree sum in C against torch, pair by pair, on bytes."""

import pytest
import torch

from evenstep.exchange.group import tree_sum
from evenstep.native import core
from evenstep.plan import tree

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = [1, 2, 3, 7, 31, 64, 2047, 2048, 2049, 6007]  # the core works in blocks of 2048


def program_of(num_inputs: int) -> bytes:
    return tree.merge_program(tuple((k, k + 1) for k in range(num_inputs)), num_inputs)


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bit patterns: all exponents, denormals, zeros of both signs, infinities, no NaN."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(ints)
    values = torch.randint(info.min, info.max, shape, dtype=ints, generator=generator).view(dtype)
    kind = torch.randint(0, 12, shape, generator=generator)
    tiny = torch.finfo(dtype).smallest_normal * torch.rand(shape, generator=generator, dtype=torch.float64)
    values = torch.where(kind < 3, tiny.to(dtype), values)
    values = torch.where(kind == 3, torch.tensor(-0.0, dtype=dtype), values)
    values = torch.where(kind == 4, torch.tensor(0.0, dtype=dtype), values)
    values = torch.where((kind > 4) & (kind < 8), torch.randn(shape, generator=generator).to(dtype), values)
    return torch.where(values.isnan(), torch.tensor(1.5, dtype=dtype), values)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the byte, except that a NaN is a NaN: torch's own depends on the position in the vector."""
    assert a.dtype == b.dtype
    numbers = ~(a.isnan() & b.isnan())
    return bytes(a[numbers].view(torch.uint8).numpy()) == bytes(b[numbers].view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_that_of_whole_tensors_added_pair_by_pair(dtype):
    for num_inputs in (1, 2, 3, 5, 8, 13):
        for length in LENGTHS:
            inputs = list(any_bits((num_inputs, length), dtype, seed=num_inputs * length).unbind(0))
            expected = tree.reduce(inputs, torch.add)
            found = tree_sum(inputs, program_of(num_inputs), torch.empty(length, dtype=dtype))
            assert same_bytes(found, expected), (num_inputs, length)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_and_opposite_infinities_give_a_nan_and_nothing_else_does(dtype):
    inf, nan = float("inf"), float("nan")
    a = torch.tensor([nan, 1.0, inf, inf, -inf, -inf, nan, 0.0, -0.0] * 9, dtype=dtype)
    b = torch.tensor([1.0, nan, inf, -inf, -inf, inf, nan, -0.0, -0.0] * 9, dtype=dtype)
    found = tree_sum([a, b], b"\0\1", torch.empty_like(a))
    assert same_bytes(found, a + b)
    assert torch.equal(found.isnan(), (a + b).isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_of_a_short_type_rounds_and_overflows_as_in_torch(dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    for other in (values.flip(0), values.roll(1), values.roll(12345), values / 3, torch.full_like(values, 1 / 3)):
        assert same_bytes(tree_sum([values, other], b"\0\1", torch.empty_like(values)), values + other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_may_go_into_any_of_its_inputs(dtype):
    for num_inputs in (1, 2, 3, 5, 8):
        for out in range(num_inputs):
            inputs = list(any_bits((num_inputs, 5001), dtype, seed=num_inputs).unbind(0))
            expected = tree.reduce([t.clone() for t in inputs], torch.add)
            assert same_bytes(tree_sum(inputs, program_of(num_inputs), inputs[out]), expected)


def test_inputs_may_lie_at_any_address():
    memory = torch.randn(3, 4000)
    inputs = [memory[0, 1:3001], memory[1, 3:3003], memory[2, 5:3005]]
    found = tree_sum(inputs, program_of(3), torch.empty(3007)[7:])
    assert same_bytes(found, (inputs[0] + inputs[1]) + inputs[2])


def test_complex_tensors_are_summed_part_by_part():
    inputs = list(torch.randn(5, 333, dtype=torch.complex64).unbind(0))
    found = tree_sum(inputs, program_of(5), torch.empty_like(inputs[0]))
    assert torch.equal(torch.view_as_real(found), torch.view_as_real(tree.reduce(inputs, torch.add)))


def test_two_hundred_and_fifty_six_inputs_are_summed_and_no_more():
    inputs = list(torch.randn(256, 10).unbind(0))
    assert same_bytes(tree_sum(inputs, program_of(256), torch.empty(10)), tree.reduce(inputs, torch.add))
    with pytest.raises(ValueError, match="at most 256"):
        tree_sum([*inputs, inputs[0]], program_of(257), torch.empty(10))


def test_an_empty_tensor_has_an_empty_sum():
    assert tree_sum([torch.empty(0), torch.empty(0)], b"\0\1", torch.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    ("num_inputs", "program"),
    [
        pytest.param(0, b"", id="nothing to add"),
        pytest.param(2, b"\0\0", id="two entries are left"),
        pytest.param(2, b"\1\0", id="a merge of one entry"),
        pytest.param(2, b"\0\2", id="too many merges"),
        pytest.param(2, b"\0\xff", id="far too many merges"),
        pytest.param(18, b"\0" * 17 + b"\x11", id="deeper than the stack"),
        pytest.param(3, b"\0\1", id="fewer counts than inputs"),
        pytest.param(1, b"\0\0", id="more counts than inputs"),
    ],
)
def test_a_malformed_program_is_refused_and_writes_nothing(num_inputs, program):
    out = torch.full((5,), 7.0)
    with pytest.raises(ValueError, match="tree_reduce"):
        tree_sum([torch.ones(5)] * num_inputs, program, out)
    assert out.tolist() == [7.0] * 5


@pytest.mark.parametrize(
    ("dtype", "op"), [(99, 0), (-1, 0), (0, 99), (0, 4)], ids=["type", "type", "op", "bits of floats"]
)
def test_an_unknown_type_or_operation_is_refused(dtype, op):
    with pytest.raises(ValueError, match="unknown type or operation"):
        core.tree_reduce(dtype, op, (0,), b"\0", 0, 0)
