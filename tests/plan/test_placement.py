from hypothesis import given
from hypothesis import strategies as st

from evenstep.plan.placement import balance, cut, share


@given(st.integers(0, 1000), st.integers(1, 300))
def test_a_cut_covers_everything_in_nearly_equal_neighbouring_spans(size, num_parts):
    spans = cut(size, num_parts)
    lengths = [end - first for first, end in spans]
    assert [k for span in spans for k in range(*span)] == list(range(size))
    assert len(spans) == num_parts
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


def test_eight_shards_on_three_workers_are_three_three_two():
    assert cut(8, 3) == [(0, 3), (3, 6), (6, 8)]


def test_a_part_of_nothing_is_empty_and_stays_in_place():
    assert cut(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12), st.integers(0, 40))
def test_shares_are_in_proportion_and_nobody_goes_without(weights, extra):
    size = len(weights) + extra
    spans = share(size, weights)
    assert [k for span in spans for k in range(*span)] == list(range(size))
    wanted = [size * weight / sum(weights) for weight in weights]
    for (first, end), amount in zip(spans, wanted, strict=True):
        assert 1 <= end - first < max(amount, 1) + 1


@given(st.integers(0, 200), st.integers(1, 40))
def test_equal_shares_are_a_cut(extra, num_parts):
    assert share(num_parts + extra, [0.3] * num_parts) == cut(num_parts + extra, num_parts)


@given(st.lists(st.integers(0, 1 << 30), max_size=60), st.integers(1, 9))
def test_no_owner_carries_more_than_the_mean_and_one_item(sizes, num_owners):
    owners = balance(sizes, num_owners)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == w) for w in range(num_owners)]
    assert len(owners) == len(sizes)
    assert max(loads) <= sum(sizes) / num_owners + max(sizes, default=0)


def test_the_owners_of_a_given_list_never_change():
    assert balance([5, 1, 1, 9, 3], 2) == [1, 1, 0, 0, 1]
    assert balance([4, 4, 4], 3) == [0, 1, 2]
