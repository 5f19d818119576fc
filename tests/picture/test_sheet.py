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


def test_many_parameters_are_cut_short():
    text = sheet.draw(trace(nn.LSTM(2, 3, 4), 4, 2))
    assert "and 10 more" in text


def test_colours_go_on_for_ever():
    assert len({colour(n) for n in range(60)}) > 50
