from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.picture.layered import place


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    nodes = [f"n{i}" for i in range(count)]
    pairs = [(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=25)) if pairs else []
    sizes = {node: (draw(st.floats(10, 200)), draw(st.floats(10, 80))) for node in nodes}
    return nodes, edges, sizes


@settings(max_examples=120)
@given(graphs())
def test_no_two_boxes_touch_and_every_edge_goes_down(graph):
    nodes, edges, sizes = graph
    placed = place(nodes, edges, sizes, gap=10, rise=20)
    corners = {}
    for node in nodes:
        (x, y), (width, height) = placed.boxes[node], sizes[node]
        corners[node] = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        assert corners[node][0] >= -1e-6
        assert corners[node][2] <= placed.width + 1e-6
        assert -1e-6 <= corners[node][1] <= corners[node][3] <= placed.height + 1e-6
    for i, a in enumerate(nodes):
        for b in nodes[i + 1 :]:
            (left, top, right, bottom), (left_b, top_b, right_b, bottom_b) = corners[a], corners[b]
            assert right <= left_b or right_b <= left or bottom <= top_b or bottom_b <= top, (a, b)
    assert set(placed.edges) == set(edges)
    for (a, b), points in placed.edges.items():
        assert [y for _, y in points] == sorted(y for _, y in points)
        assert points[0][1] == corners[a][3]
        assert points[-1][1] == corners[b][1]


def test_a_chain_is_straight():
    nodes = ["a", "b", "c"]
    placed = place(nodes, [("a", "b"), ("b", "c")], {node: (50.0, 20.0) for node in nodes}, gap=10, rise=20)
    assert {x for x, _ in placed.boxes.values()} == {25.0}
    assert [y for _, y in placed.boxes.values()] == [10.0, 50.0, 90.0]


def test_two_chains_that_need_not_cross_do_not():
    nodes = ["a", "b", "d", "c"]  # a-d and b-c: drawn as they come, they would cross
    sizes = {node: (50.0, 20.0) for node in nodes}
    boxes = place(nodes, [("a", "c"), ("b", "d")], sizes, gap=10, rise=20).boxes
    assert (boxes["a"][0] < boxes["b"][0]) == (boxes["c"][0] < boxes["d"][0])
