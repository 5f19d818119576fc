"""Gradients over machines, as a plan: every byte has one home, and everyone plans alike."""

from hypothesis import given
from hypothesis import strategies as st

from evenstep.plan.across import EVERY, most_pieces, plan_across
from evenstep.plan.machines import share_machines

SIZES = [400, 1 << 20, 64, 5 << 20, 3_000_000, 8]


def plans(sizes, counts, num_shards=8):
    machines = [machine for machine, count in enumerate(counts) for _ in range(count)]
    spans = share_machines(num_shards, [1.0] * len(machines), machines)
    return [plan_across(sizes, spans, rank, machines) for rank in range(len(machines))]


@given(st.lists(st.integers(0, 3 << 20), min_size=1, max_size=12), st.lists(st.integers(1, 3), min_size=2, max_size=3))
def test_every_byte_of_every_parameter_is_in_one_piece(sizes, counts):
    plan = plans(sizes, counts, 12)[0]
    assert len(plan.pieces) <= most_pieces(sizes)
    for b, bucket in enumerate(plan.local.buckets):
        pieces = [plan.pieces[n] for n in plan.pieces_of[b]]
        assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == plan.bucket_bytes[b]
        assert all(plan.offsets[i] % 64 == 0 and plan.offsets[i] + sizes[i] <= plan.bucket_bytes[b] for i in bucket)
        assert len(pieces) == 1 or len(bucket) == 1, "only a single large parameter is cut"
    assert sorted(i for bucket in plan.local.buckets for i in bucket) == list(range(len(sizes)))


def test_everyone_plans_alike_but_for_who_it_is():
    found = plans(SIZES, [2, 1, 1])
    for plan in found:
        assert (plan.pieces, plan.nodes, plan.program, plan.local.buckets) == (
            found[0].pieces,
            found[0].nodes,
            found[0].program,
            found[0].local.buckets,
        )
    assert [plan.machine for plan in found] == [0, 0, 1, 2]
    assert [plan.own for plan in found] == [[0], [0], [1], [2]]
    assert [plan.workers for plan in found] == [range(2), range(2), range(2, 3), range(3, 4)]


def test_the_workers_of_a_machine_share_out_all_parameters_and_homes_are_balanced():
    found = plans(SIZES, [2, 1, 1])
    owned = [plan.local.owned for plan in found]
    assert sorted(owned[0] + owned[1]) == owned[2] == owned[3] == list(range(len(SIZES)))
    load = [sum(p.end - p.begin for p in found[0].pieces if p.home == machine) for machine in range(3)]
    assert max(load) - min(load) <= 1 << 20


def test_two_machines_add_up_everything_for_themselves_if_each_has_one_node_to_send():
    for counts, num_shards in (([1, 1], 8), ([2, 2], 8), ([1, 1], 2)):
        assert {piece.home for piece in plans(SIZES, counts, num_shards)[0].pieces} == {EVERY}
    uneven = plans(SIZES, [1, 3])[0]
    assert len(uneven.nodes) > 2
    assert {piece.home for piece in uneven.pieces} == {0, 1}, "else a machine would send several nodes of everything"


def test_small_gradients_are_a_piece_or_two_on_two_machines_and_no_bias_travels_alone():
    sizes = [4 * 256 * 256, 4 * 256] * 4
    assert len(plans(sizes, [1, 1])[0].pieces) == 1
    assert len(plans(sizes * 2, [1, 1])[0].pieces) == 2
    assert len(plans(sizes, [1, 1, 1])[0].pieces) == 4
    for machines in ([0, 1, 2], [0, 1, 1]):
        with_keeper = plan_across(sizes, [(0, 0), (0, 4), (4, 8)], 0, machines)
        assert [piece.home for piece in with_keeper.pieces] == [EVERY], "machine 0 has nothing to send"


@given(st.lists(st.integers(1, 3 << 19), min_size=1, max_size=60), st.integers(3, 8))
def test_a_machine_sends_little_more_than_its_share(sizes, num_machines):
    plan = plans(sizes, [1] * num_machines)[0]
    total = sum(plan.bucket_bytes)
    piece = max(piece.end - piece.begin for piece in plan.pieces)
    home = max(sum(p.end - p.begin for p in plan.pieces if p.home == machine) for machine in range(num_machines))
    assert home <= total / num_machines + piece
    if total > 8 << 20:
        assert piece <= 2 * total / (8 * (num_machines - 1)) + 64


def test_the_nodes_of_a_machine_come_from_those_of_its_workers():
    plan = plans(SIZES, [3, 3])[0]
    assert plan.nodes == ((0, (0, 4)), (1, (4, 8)))
    assert plan.parts == ((0, 2), (2, 3), (3, 4))
    assert plan.inputs_of((0, 4)) == ([0, 1, 2], b"\0\0\2")
