"""Topologies for tests: a few that exist, and any that could."""

from hypothesis import strategies as st

from evenstep.plan.topology import Device, Link, LinkKind, Machine, Topology

NVLINK = Link(LinkKind.NVLINK, 200e9, 2e-6)


def dgx(name: str = "node", rack: str | None = None) -> Machine:
    """Eight GPUs, all joined by NVLink, on two sockets."""
    devices = tuple(Device(f"gpu{i}", socket=i // 4, numa=i // 4, switch=f"s{i // 2}") for i in range(8))
    return Machine(name, devices, tuple((a, b, NVLINK) for a in range(8) for b in range(a + 1, 8)), rack)


def boards() -> Machine:
    """Eight GPUs in boards of two in sockets of four."""
    return Machine("boards", tuple(Device(f"gpu{i}", i // 4, i // 4, board=f"b{i // 2}") for i in range(8)))


@st.composite
def machines(draw, name: str) -> Machine:
    numbers = st.integers(0, 1)
    letters = st.none() | st.sampled_from("ab")
    speeds = st.sampled_from([0.5, 1.0, 1.0, 2.0, 7.5])
    devices = tuple(
        Device(f"d{i}", draw(numbers), draw(numbers), draw(letters), draw(letters), draw(speeds), draw(st.booleans()))
        for i in range(draw(st.integers(1, 5)))
    )
    places = st.integers(0, len(devices) - 1)
    pairs = draw(st.sets(st.tuples(places, places).filter(lambda pair: pair[0] < pair[1]), max_size=4))
    kinds = st.sampled_from([kind for kind in LinkKind if kind not in (LinkKind.NETWORK, LinkKind.SPINE)])
    links = tuple((a, b, Link(draw(kinds), draw(st.sampled_from([1e9, 3e9])), 1e-6)) for a, b in sorted(pairs))
    return Machine(name, devices, links, draw(st.sampled_from([None, "r0", "r1"])))


@st.composite
def topologies(draw) -> Topology:
    return Topology(tuple(draw(machines(f"m{i}")) for i in range(draw(st.integers(1, 4)))))
