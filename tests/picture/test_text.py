from dataclasses import replace

import pytest

from evenstep.picture import text
from evenstep.plan.planner import compare, in_order
from evenstep.plan.topology import Device, Machine, Topology


def two_sockets() -> Topology:
    return Topology((Machine("m", tuple(Device(f"g{i}", numa=i // 2) for i in range(3))),))


def test_the_matrix_and_what_links_can_do():
    assert text.matrix(two_sockets()).splitlines() == [
        "3 devices on 1 machine",
        "",
        "         g0       g1       g2",
        "g0        .   bridge   socket",
        "g1   bridge        .   socket",
        "g2   socket   socket        .",
        "",
        "bridge                     20 GB/s                  6 \u00b5s",
        "socket                     12 GB/s                  8 \u00b5s",
    ]


def test_the_tree_says_which_link_each_sum_takes():
    topology = two_sockets()
    assert text.tree(topology, in_order(topology, 8)).splitlines() == [
        "shards 0-7 on g0",
        "\u251c\u2500 shards 0-3 on g0",
        "\u2502  \u251c\u2500 shards 0-1 on g0",
        "\u2502  \u2514\u2500 shards 2-3 on g0",
        "\u2502     \u251c\u2500 shard 2 on g0",
        "\u2502     \u2514\u2500 shard 3 on g1   bridge to g0",
        "\u2514\u2500 shards 4-7 on g1   bridge to g0",
        "   \u251c\u2500 shards 4-5 on g1",
        "   \u2514\u2500 shards 6-7 on g2   socket to g1",
    ]


def test_of_many_machines_the_matrix_is_left_out_and_ranges_are_given():
    machine = two_sockets().machines[0]
    links = tuple((0, b, replace(two_sockets().link(0, 1), bandwidth_bytes_per_s=b * 1e9)) for b in (1, 2))
    topology = Topology(tuple(replace(machine, name=f"m{i}", links=links, rack=f"r{i % 2}") for i in range(20)))
    assert [" ".join(line.split()) for line in text.matrix(topology).splitlines()] == [
        "60 devices on 20 machines",
        "",
        "bridge 1 GB/s .. 2 GB/s 6 \u00b5s",
        "socket 12 GB/s 8 \u00b5s",
        "network 12.5 GB/s 15 \u00b5s",
        "spine 6.25 GB/s 30 \u00b5s",
    ]
    assert text.tree(topology, in_order(topology, 60)) == "a tree over 60 shards on 60 devices"


def test_plans_are_a_table_that_marks_what_does_not_keep_the_bits():
    lines = text.plans(compare(two_sockets(), 8, 1e8)).splitlines()
    assert lines[0].split() == ["plan", "predicted", "over", "slow", "links", "same", "bits"]
    assert {line.rsplit(None, 1)[1] for line in lines if line.startswith("ring")} == {"no"}


@pytest.mark.parametrize(
    ("value", "words"), [(12.5e9, "12.5 GB"), (0, "0 B"), (1, "1 B"), (2e-6, "2 \u00b5B"), (1e17, "100 PB")]
)
def test_quantities_have_three_digits_and_a_prefix(value, words):
    assert text.quantity(value, "B") == words
