"""Cutting parameters over servers: balanced, complete, and with the bits of the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.core.errors import RefusedError
from evenstep.server.wire.slices import ALIGNMENT, Slices
from evenstep.server.wire.tensors import INDICES, VALUES, ParameterLayout, Spec

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=8)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])


def some(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return {f"p{n}": torch.randint(-99, 99, s, generator=generator).to(dtype) for n, s in enumerate(shapes)}


def layout_of(tensors):
    return ParameterLayout({name: Spec.of(tensor) for name, tensor in tensors.items()})


@given(SHAPES, DTYPES, st.integers(1, 5), st.booleans())
@settings(max_examples=150)
def test_what_is_cut_and_joined_is_what_it_was(shapes, dtype, count, split):
    tensors = some(shapes, dtype)
    slices = Slices(layout_of(tensors), count, split=split)
    parts = slices.cut(tensors)
    assert [{n: Spec.of(t) for n, t in part.items()} for part in parts] == [slices.specs(i) for i in range(count)]
    whole, room = slices.room(tensors, None)
    for part, pieces in zip(parts, room, strict=True):
        assert part.keys() == pieces.keys()
        for name, piece in pieces.items():
            piece.copy_(part[name])
    assert all(torch.equal(whole[name], tensors[name]) for name in tensors)
    assert Slices.read(slices.text, count, split=split).fingerprint == slices.fingerprint
    assert Slices.read(slices.text, count + 1, split=split).fingerprint != slices.fingerprint


@given(SHAPES, st.integers(2, 5), st.booleans())
@settings(max_examples=150)
def test_servers_get_about_the_same(shapes, count, split):
    slices = Slices(layout_of(some(shapes)), count, split=split)
    loads = [sum(spec.num_bytes for spec in slices.specs(i).values()) for i in range(count)]
    whole = [piece.spec.num_bytes for pieces in slices.pieces for piece in pieces if piece.whole]
    assert max(loads) - min(loads) <= max([2 * 4 * ALIGNMENT, *whole]), "one cut further, or one small parameter"
    if split:
        share = slices.layout.num_bytes / count
        assert all(size <= max(share / 8, 4 * ALIGNMENT) for size in whole), "what is large is cut"


@given(st.integers(0, 3000), st.integers(2, 4), st.floats(0.001, 1))
@settings(max_examples=60)
def test_top_k_values_go_to_where_their_elements_are(size, count, share):
    dense = torch.zeros(size)
    indices = torch.randperm(size)[: int(share * size)].sort().values
    values = torch.randn(len(indices))
    dense[indices] = values
    slices = Slices(layout_of({"w": dense, "b": torch.zeros(1)}), count, split=True)
    parts = slices.cut({"w" + INDICES: indices, "w" + VALUES: values})
    for server, piece in slices.places["w"]:
        found = torch.zeros(piece.spec.num_elements)
        found[parts[server][piece.name + INDICES]] = parts[server][piece.name + VALUES]
        assert torch.equal(found, piece.of(dense))


def test_what_cannot_be_cut_is_one_sentence():
    slices = Slices(layout_of({"w": torch.zeros(1000)}), 2, split=True)
    for indices in ([3, 2], [-1, 2], [2, 1000], [2, 2]):
        with pytest.raises(RefusedError, match="the top-k indices of 'w' do not grow from 0 to 999"):
            slices.cut({"w" + INDICES: torch.tensor(indices), "w" + VALUES: torch.zeros(2)})
    with pytest.raises(RefusedError, match=r"'w' came as float32\[999\], expected float32\[1000\]"):
        slices.cut({"w": torch.zeros(999)})
    with pytest.raises(RefusedError, match=r"'w\[0:512\]' is what a part of 'w' would be called"):
        Slices(layout_of({"w": torch.zeros(1000), "w[0:512]": torch.zeros(1)}), 2, split=True)
    sizes = ['["x"]', "[-1]", "[true]", "[1e999]", f"[{10**30}]", "7", "null"]
    texts = ["[]", "{", '{"w": 1}', '{"w": ["F99", []]}', *(f'{{"w": ["F32", {size}]}}' for size in sizes)]
    for text in texts:
        with pytest.raises(RefusedError, match=r"the layout of all parameters|tensor 'w' has"):
            Slices.read(text, 2, split=True)
