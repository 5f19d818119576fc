"""Sites are what their places say."""

from evenstep.plan.sites import Sites


def test_one_machine_is_one_site_whose_first_worker_is_first():
    assert [Sites.of(rank, "aaa").is_first for rank in range(3)] == [True, False, False]
    assert Sites.of(2, "aaa").are_one
    assert Sites.of(2, "aaa").mine == (0, 1, 2)


def test_workers_with_memory_of_their_own_are_sites_of_their_own():
    sites = Sites.of(1, range(3))
    assert sites.members == ((0,), (1,), (2,))
    assert sites.is_first
    assert not sites.are_one


def test_sites_come_in_the_order_of_their_first_workers():
    assert Sites.of(3, "babac").members == ((0, 2), (1, 3), (4,))
    assert Sites.of(3, "babac").mine == (1, 3)
    assert not Sites.of(3, "babac").is_first


def test_the_first_shard_of_each_site_is_the_first_that_has_samples():
    sites = Sites.of(0, "aab")
    assert sites.first_shards([(0, 2), (2, 3), (3, 5)], [0, 0, 4, 0, 1]) == [2, 4]
    assert sites.first_shards([(0, 2), (2, 3), (3, 5)], [1, 1, 1, 0, 0]) == [0, None]
