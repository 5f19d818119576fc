"""Products have the bits that product.h says, whichever way they are computed; the C library's fma is the judge."""

import ctypes
import itertools

import pytest
import torch

from evenstep.native import arithmetic

pytestmark = pytest.mark.skipif(not arithmetic.bits(), reason="this processor has no AVX2 and FMA")

libm = ctypes.CDLL("libm.so.6")
FUSED = {torch.float32: libm.fmaf, torch.float64: libm.fma}
for dtype, number in ((torch.float32, ctypes.c_float), (torch.float64, ctypes.c_double)):
    FUSED[dtype].restype, FUSED[dtype].argtypes = number, (number,) * 3

SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (6, 16, 40),
    (7, 17, 33),
    (12, 32, 20),
    (13, 33, 9),
    (1, 40, 300),
    (40, 1, 30),
    (5, 9, 600),
]


def definition(a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, c: torch.Tensor) -> torch.Tensor:
    """Sums of 256 terms by fused multiply-adds, added to each other in the same way."""
    fused, out = FUSED[a.dtype], torch.empty_like(c)
    left, right, before = a.tolist(), b.T.tolist(), c.tolist()
    for i, j in itertools.product(range(len(left)), range(len(right))):
        total = None if beta == 0 else torch.tensor(before[i][j], dtype=c.dtype).mul(beta).item()
        for block in range(0, a.shape[1], 256):
            partial = 0.0
            for x, y in zip(left[i][block : block + 256], right[j][block : block + 256], strict=True):
                partial = fused(x, y, partial)
            total = fused(alpha, partial, 0.0) if total is None else fused(alpha, partial, total)
        out[i, j] = total if total is not None else 0.0
    return out


def product(a: torch.Tensor, b: torch.Tensor, alpha: float, beta: float, c: torch.Tensor) -> None:
    arguments = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), beta, c.data_ptr(), *c.stride())
    arithmetic.product(a.dtype == torch.float64, *c.shape, a.shape[1], alpha, *arguments)


@pytest.fixture(params=(256, 512))
def bits(request):
    arithmetic.limit_bits(request.param)
    try:
        if arithmetic.bits() != request.param:
            pytest.skip(f"this processor has no vectors of {request.param} bits")
        yield
    finally:
        arithmetic.limit_bits(512)


def made(rows: int, columns: int, dtype: torch.dtype, seed: int, turned: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (columns, rows) if turned else (rows, columns)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return matrix.T if turned else matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_a_product_has_the_bits_of_its_definition(bits, shape, dtype):
    m, n, k = shape
    for turned in itertools.product((False, True), repeat=3):
        a, b = made(m, k, dtype, 1, turned[0]), made(k, n, dtype, 2, turned[1])
        alpha, beta = (1.0, 0.0) if turned[2] else (0.37, 0.75)
        alpha, beta = torch.tensor([alpha, beta], dtype=dtype).tolist()
        c = made(m, n, dtype, 3, turned[2])
        expected = definition(a, b, alpha, beta, c)
        product(a, b, alpha, beta, c)
        assert torch.equal(c, expected), f"{shape} {dtype} {turned}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_products_are_right_and_do_not_depend_on_how_they_are_cut(bits, dtype):
    for m, n, k in ((300, 1100, 513), (150, 70, 1030), (2, 2049, 257), (32, 1030, 520), (8, 2049, 300)):
        a, b = made(m, k, dtype, 1, False), made(k, n, dtype, 2, True)
        c, pieces = torch.empty(m, n, dtype=dtype), torch.empty(m, n, dtype=dtype)
        product(a, b, 1.0, 0.0, c)
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)
        for rows in (slice(0, m // 3), slice(m // 3, m)):
            for columns in (slice(0, n // 2 + 1), slice(n // 2 + 1, n)):
                product(a[rows], b[:, columns], 1.0, 0.0, pieces[rows, columns])
        assert torch.equal(c, pieces)


def test_a_sum_of_nothing_is_zero_or_what_was_there(bits):
    a, b, c = torch.empty(2, 0), torch.empty(0, 3), torch.full((2, 3), float("nan"))
    product(a, b, 1.0, 0.0, c)
    assert torch.equal(c, torch.zeros(2, 3))
    c = torch.full((2, 3), 4.0)
    product(a, b, 1.0, 0.5, c)
    assert torch.equal(c, torch.full((2, 3), 2.0))


def test_a_result_without_contiguous_rows_or_columns_is_refused():
    a = torch.ones(4, 4)
    with pytest.raises(ValueError, match="one stride of the result must be 1"):
        product(a, a, 1.0, 0.0, torch.empty(8, 8)[::2, ::2])
