"""The fingerprint is a promise to whoever wrote one down: these values must never change."""

import hashlib

import pytest
import torch

from evenstep.core.fingerprint import digest, fingerprint

TENSORS = {
    "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bias": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "nothing": torch.empty(0, 4, dtype=torch.float64),
}
GOLDEN = "a67595cb6b99599123dbcdb844054754b8c2224fd3b7e180d0c1a7752863aa65"


def test_the_fingerprint_of_given_tensors_never_changes():
    sha = hashlib.sha256()
    for name, head in (
        ("bias", "(2,)|bfloat16"),
        ("count", "()|int64"),
        ("nothing", "(0, 4)|float64"),
        ("weight", "(2, 3)|float32"),
    ):
        data = bytes(TENSORS[name].reshape(-1).view(torch.uint8).numpy()) if TENSORS[name].numel() else b""
        sha.update(hashlib.sha256(f"{name}|{head}|".encode() + data).digest())
    sha.update(b"optimizer.step=3|")
    found = fingerprint(TENSORS, {"optimizer.step": 3})
    assert found == sha.hexdigest()
    assert found == GOLDEN


def test_the_order_of_tensors_and_values_does_not_matter():
    turned = dict(reversed(TENSORS.items()))
    assert fingerprint(TENSORS, {"b": 1, "a": 2}) == fingerprint(turned, {"a": 2, "b": 1})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(torch.zeros(4), torch.zeros(2, 2), id="shape"),
        pytest.param(torch.zeros(2, dtype=torch.float32), torch.zeros(2, dtype=torch.int32), id="dtype"),
        pytest.param(torch.tensor([0.0]), torch.tensor([-0.0]), id="sign of zero"),
        pytest.param(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), id="one bit"),
        pytest.param(torch.empty(0, 3), torch.empty(3, 0), id="shape of nothing"),
    ],
)
def test_whatever_differs_in_a_tensor_shows(a, b):
    assert digest("x", a) != digest("x", b)
    assert fingerprint({"x": a}) != fingerprint({"x": b})


def test_names_and_values_show():
    one = torch.ones(1)
    assert (
        len(
            {fingerprint(t, v) for t, v in (({"a": one}, {}), ({"b": one}, {}), ({"a": one}, {"a": 1}), ({}, {"a": 1}))}
        )
        == 4
    )


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.complex64, torch.float16, torch.uint8, torch.float8_e4m3fn], ids=str
)
def test_tensors_of_any_type_and_layout_have_a_digest(dtype):
    values = torch.randint(0, 2, (3, 4)).to(dtype)
    strided = torch.empty_strided((3, 4), (1, 3), dtype=dtype).copy_(values)
    assert digest("x", strided) == digest("x", values)
    assert digest("x", values[:, ::2]) == digest("x", values[:, ::2].clone())


def test_a_parameter_has_the_digest_of_its_values():
    values = torch.randn(3)
    assert digest("x", torch.nn.Parameter(values)) == digest("x", values)
