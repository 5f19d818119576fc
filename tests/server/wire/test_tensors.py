"""Tensors as messages: whatever a head says, it is refused or exact."""

import random

import pytest
import safetensors.torch
import torch

from evenstep.core.errors import RefusedError
from evenstep.server.wire.tensors import DTYPES, ParameterLayout, Sender, Spec, TensorHead, encode, head_length


def test_heads_of_tensors_are_refused_or_exact():
    """Whatever a head says, it is refused or describes exactly the bytes that follow."""
    dice = random.Random(3)
    whole = bytes(encode({"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "none": torch.zeros(0)})[0][8:])
    accepted = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(dice.randint(0, 3)):
            data[dice.randrange(len(data))] = dice.choice(b'0123456789,:[]{}" -F')
        try:
            head = TensorHead.parse(bytes(data), 60)
        except RefusedError:
            continue
        accepted += 1
        assert sum(spec.num_bytes for spec in head.specs.values()) == 60
        assert sum(t.nbytes for t in head.tensors(bytearray(60)).values()) == 60
    assert accepted


def message(tensors):
    return b"".join(bytes(part) for part in encode(tensors))


def test_messages_are_safetensors_in_both_directions():
    torch.manual_seed(0)
    tensors = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES.values() if not dtype.is_complex}
    tensors |= {"none": torch.zeros(0, 4), "one": torch.tensor(2.5), "noise": torch.randn(7, 5)}
    found = safetensors.torch.load(message(tensors))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    data = safetensors.torch.save(tensors)
    length = 8 + head_length(data[:8], len(data))
    read = TensorHead.parse(data[8:length], len(data) - length).tensors(bytearray(data[length:]))
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("x", Spec(torch.float32, (2,)), "there is no parameter 'x'"),
        ("w", Spec(torch.float32, (3,)), r"'w' came as float32\[3\], expected float32\[2\]"),
        ("w", Spec(torch.float64, (2,)), r"'w' came as float64\[2\], expected float32\[2\]"),
    ],
)
def test_a_layout_names_what_does_not_fit(name, spec, words):
    layout = ParameterLayout({"w": Spec(torch.float32, (2,)), "b": Spec(torch.float32, (1,))})
    with pytest.raises(RefusedError, match=words):
        layout.check(name, spec)
    with pytest.raises(RefusedError, match="'b' is missing; expected all 2 parameters"):
        layout.check_whole({"w": Spec(torch.float32, (2,))})
    layout.check("w", Spec(torch.bfloat16, (2,)), also=(torch.bfloat16,))


def test_a_sender_sees_tensors_that_moved():
    sender, tensors = Sender(), {"w": torch.ones(2)}
    first = sender.encode(tensors)
    tensors["w"].fill_(3)
    assert sender.encode(tensors) is first
    assert b"".join(bytes(part) for part in sender.encode({"w": torch.full((2,), 4.0)})) == message(
        {"w": torch.full((2,), 4.0)}
    )
