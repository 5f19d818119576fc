import re
from xml.etree import ElementTree

import pytest
from torch import nn
from traceable import Residual, Untraceable

from evenstep.picture import sheet
from evenstep.picture.network import Network, Node, partition
from evenstep.picture.svg import colour
from evenstep.picture.trace import trace

SVG = "{http://www.w3.org/2000/svg}"


def tips(text: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(text).iter(f"{SVG}title")]


def test_every_node_every_shard_and_every_owner_is_there():
    network = trace(Residual(), 8, 3)
    found = tips(sheet.draw(network))
    assert sum("on worker" in tip for tip in found) == 8
    for parameter in network.partition.parameters:
        owner = "frozen" if parameter.owner is None else f"worker {parameter.owner}"
        assert any(tip.startswith(parameter.name + " ") and tip.endswith(owner) for tip in found)
    assert any("BatchNorm1d" in tip and "all shards meet here" in tip for tip in found)


@pytest.mark.parametrize("write", [sheet.draw, sheet.page])
def test_nothing_comes_from_elsewhere(write):
    text = write(trace(Residual(), 8, 2))
    assert re.findall(r"(?:href|src)=|url\((?!#)|@import|<script", text) == []


def test_names_are_escaped():
    node = Node("a", "<b> & c", "Kind<T>", detail='"x"', parameters=("<p>",))
    network = Network("<Net>", (node,), (), partition([("<p>", (2,), 8, True)], 2, 1), "fx", "a <note>")
    ElementTree.fromstring(sheet.draw(network))
    assert "<Net>" not in sheet.page(network)
    assert "<p>" not in sheet.page(network)


def test_a_tree_of_modules_says_that_it_is_one():
    assert "tree of modules" in sheet.draw(trace(Untraceable(), 300, 12))


def test_a_model_without_parameters_can_be_drawn():
    ElementTree.fromstring(sheet.draw(trace(nn.ReLU(), 1, 1)))


def test_many_parameters_are_cut_short_but_all_have_the_colour_of_their_owner():
    text = sheet.draw(trace(nn.LSTM(2, 3, 4), 4, 2))
    assert ">10 more<" in text
    assert sum("_l" in tip and "worker" in tip for tip in tips(text)) == 16


def test_of_a_long_name_the_end_is_shown():
    name = "layers.0.self_attention.projection_of_keys.weight"
    node = Node("a", "linear", "function", parameters=(name,))
    text = sheet.draw(Network("Net", (node,), (), partition([(name, (2,), 8, True)], 2, 1), "fx"))
    shown = next(each.text for each in ElementTree.fromstring(text).iter(f"{SVG}text") if "\u2026" in (each.text or ""))
    assert name.endswith(shown.removeprefix("\u2026"))
    assert len(shown) > 12


def test_a_long_note_stays_inside_the_picture():
    note = "fx could not trace it (Error: of many words); " * 8
    network = Network("Net", (), (), partition([], 1, 1), "modules", note)
    root = ElementTree.fromstring(sheet.draw(network))
    lines = [text for text in root.iter(f"{SVG}text") if text.get("fill") == "#c05621"]
    assert " ".join(line.text for line in lines) == note.strip()
    assert max(len(line.text) for line in lines) * 11 * 0.56 + 32 < float(root.get("width"))


def test_letters_stand_right_in_viewers_that_know_no_central_baseline():
    assert "dominant-baseline" not in sheet.draw(trace(nn.Linear(2, 2), 4, 1))


def test_colours_go_on_for_ever():
    assert len({colour(n) for n in range(60)}) > 50
