"""What torch asks of a BLAS and a LAPACK for halves and triangles has the right bits in every layout."""

import ctypes
import itertools

import pytest
import torch

from evenstep.native import arithmetic

pytestmark = pytest.mark.skipif(not arithmetic.bits(), reason="this processor has no AVX2 and FMA")

BY_ROWS, BY_COLUMNS, PLAIN, TRANSPOSED = 101, 102, 111, 112
library = ctypes.CDLL(arithmetic.__file__)


def laid(matrix: torch.Tensor, by_rows: bool) -> tuple[torch.Tensor, int]:
    """The matrix in memory, with room between its lines, and how far these are from each other."""
    lines = matrix if by_rows else matrix.T
    room = torch.zeros(lines.shape[0], lines.shape[1] + 3, dtype=matrix.dtype)
    room[:, : lines.shape[1]] = lines
    return room, room.shape[1]


def product(a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, c: torch.Tensor) -> torch.Tensor:
    c = c.clone()
    arguments = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), beta, c.data_ptr(), *c.stride())
    arithmetic.product(False, *c.shape, a.shape[1], alpha, *arguments)
    return c


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("by_rows", [False, True])
def test_halves_are_multiplied_as_floats(name, dtype, by_rows):
    multiply = getattr(library, f"es_gemm_{name}")
    numbers = [ctypes.c_int] * 6 + [ctypes.c_float, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    multiply.argtypes = [*numbers, ctypes.c_float, ctypes.c_void_p, ctypes.c_int]
    m, n, k = 7, 11, 300
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.randn(m, n)
    expected = product(a.float(), b.float(), 0.5, 0.25, c)
    for turn_a, turn_b in itertools.product((False, True), repeat=2):
        (left, lda), (right, ldb) = laid(a.T if turn_a else a, by_rows), laid(b.T if turn_b else b, by_rows)
        into, ldc = laid(c, by_rows)
        turns = [TRANSPOSED if turn else PLAIN for turn in (turn_a, turn_b)]
        pointers = (left.data_ptr(), lda, right.data_ptr(), ldb)
        multiply(BY_ROWS if by_rows else BY_COLUMNS, *turns, m, n, k, 0.5, *pointers, 0.25, into.data_ptr(), ldc)
        found = into[:, :-3] if by_rows else into[:, :-3].T
        assert torch.equal(found, expected), (turn_a, turn_b)
        assert not into[:, -3:].any()


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("size", [0, 1, 5, 70])
def test_a_triangle_is_that_of_doubles_rounded(upper, size):
    square = torch.randn(size, size, dtype=torch.float64)
    positive = (square @ square.T + torch.eye(size, dtype=torch.float64)).float()
    exact = torch.linalg.cholesky(positive.double())
    arithmetic.redirect("libtorch_cpu.so")
    try:
        found = torch.linalg.cholesky(positive, upper=upper)
    finally:
        arithmetic.restore()
    torch.testing.assert_close(found.double(), exact.T if upper else exact, rtol=1e-6, atol=1e-7)


def test_what_has_no_triangle_is_told_with_its_row():
    arithmetic.redirect("libtorch_cpu.so")
    try:
        hollow = torch.eye(6)
        hollow[3, 3] = -1
        assert torch.linalg.cholesky_ex(hollow).info == 4
        with pytest.raises(torch.linalg.LinAlgError, match="leading minor of order 4"):
            torch.linalg.cholesky(hollow)
    finally:
        arithmetic.restore()
