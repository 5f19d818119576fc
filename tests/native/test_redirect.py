"""While torch's calls are redirected, its operations compute with our kernels; afterwards with its own, to the bit."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from evenstep.native import arithmetic

pytestmark = pytest.mark.skipif(not arithmetic.bits(), reason="this processor has no AVX2 and FMA")


@contextmanager
def redirected() -> Iterator[list[str]]:
    missed = arithmetic.redirect("libtorch_cpu.so")
    try:
        yield missed
    finally:
        arithmetic.restore()


def ours(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype)
    arguments = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), 0.0, c.data_ptr(), *c.stride())
    arithmetic.product(a.dtype == torch.float64, *c.shape, a.shape[1], 1.0, *arguments)
    return c


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_way_to_multiply_uses_our_product(dtype):
    a, b = torch.randn(30, 700, dtype=dtype), torch.randn(700, 20, dtype=dtype)
    expected = ours(a, b)
    turned = torch.randn(20, 700, dtype=dtype)
    with redirected():
        assert torch.equal(torch.mm(a, b), expected)
        assert torch.equal(F.linear(a, turned), ours(a, turned.T))
        assert torch.equal(torch.addmm(torch.zeros(20, dtype=dtype), a, b), expected)
        assert torch.equal(torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1)), expected.expand(3, -1, -1))
        assert torch.equal(torch.mv(a, b[:, 3]), expected[:, 3])
        assert torch.equal(torch.mv(b.T, a[2]), expected[2])
        assert torch.equal(torch.einsum("ik,kj->ji", a, b), expected.T)
        x, w = a.requires_grad_(), b.requires_grad_()
        torch.mm(x, w).backward(torch.ones(30, 20, dtype=dtype))
        assert torch.equal(x.grad, ours(torch.ones(30, 20, dtype=dtype), w.detach().T))
        assert torch.equal(w.grad, ours(x.detach().T, torch.ones(30, 20, dtype=dtype)))


def test_a_dot_product_is_right_for_all_steps():
    x, y = torch.randn(1001, dtype=torch.float64), torch.randn(1001, dtype=torch.float64)
    with redirected():
        for step in (1, 3):
            found, exact = torch.dot(x[::step], y[::step]), np.dot(x[::step].numpy(), y[::step].numpy())
            assert abs(found.item() - exact) < 1e-12
            assert abs(torch.dot(x.float()[::step], y.float()[::step]).item() - exact) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_roots_are_correctly_rounded(dtype):
    x = torch.rand(100_003, dtype=dtype).div_(torch.randint(1, 1000, (100_003,)))
    x[:4] = torch.tensor([0.0, -0.0, float("inf"), 2.0**-140 if dtype == torch.float32 else 2.0**-1060], dtype=dtype)
    with redirected():
        found, odd = torch.sqrt(x), torch.sqrt(x[1:])
        negative = torch.sqrt(torch.tensor([-1.0, float("nan")], dtype=dtype))
    exact = np.sqrt(x.numpy())  # the processor's own, which IEEE 754 defines
    assert found.numpy().tobytes() == exact.tobytes()
    assert odd.numpy().tobytes() == exact[1:].tobytes()
    assert negative.isnan().all()


def test_functions_of_single_floats_are_those_of_doubles_rounded():
    x = torch.randn(1000)
    with redirected():
        strided = torch.sinh(x[::3]), torch.atan(x), torch.atan2(x[::2], x[1::2])
    wide = x.double().numpy()
    expected = np.sinh(wide[::3]), np.arctan(wide), np.arctan2(wide[::2], wide[1::2])
    for found, exact in zip(strided, expected, strict=True):
        ulps = np.abs(found.numpy() - exact) / np.spacing(np.abs(found.numpy()))
        assert ulps.max() <= 0.5000001


def test_afterwards_torch_computes_as_before():
    a, x = torch.randn(64, 3000), torch.rand(1000)
    before = a @ a.T, x.sqrt(), x.atan()
    for _ in range(2):
        with redirected() as missed:
            assert missed == []
            a @ a.T
        for old, new in zip(before, (a @ a.T, x.sqrt(), x.atan()), strict=True):
            assert torch.equal(old, new)


def test_a_library_that_is_not_there_is_named():
    code = "from evenstep.native import arithmetic; arithmetic.redirect('libtorch_cpu.so')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "LookupError: libtorch_cpu.so is not loaded" in done.stderr
