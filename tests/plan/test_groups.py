"""Groups, workers and servers by name and by counts: a table, and one sentence where they contradict each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.errors import ConfigError
from evenstep.plan.groups import FRAMEWORKS, MAX_BUNDLES, Setup, Standing, bundles_of, choose


@pytest.mark.parametrize(
    ("name", "expected", "says"),
    [
        ("sandblaster", Setup("sandblaster", 1, 8, 2, 2), "1 group of 8 workers, 2 servers"),
        ("allreduce", Setup("allreduce", 1, 8, 0, 1), "1 group of 8 workers, which own the parameters; no server"),
        ("downpour", Setup("downpour", 2, 4, 1, 1), "2 groups of 4 workers, 1 server, a group may be any number of"),
        ("hogwild", Setup("hogwild", 2, 1, 1, 1, lock=False), "1 server, updates in shared memory without a lock"),
        ("distributed-hogwild", Setup("distributed-hogwild", 2, 1, 2, 1), "2 servers in 2 groups that tell each other"),
    ],
)
def test_a_name_stands_for_counts(name, expected, says):
    assert choose(name, cores=8) == expected
    assert says in expected.describe()
    same = {"groups": expected.groups, "workers": expected.workers, "servers": expected.servers}
    assert choose(name, servers_per_group=expected.servers_per_group, **same) == expected, (
        "counts that agree are welcome"
    )
    assert len(FRAMEWORKS) == 5


def test_counts_without_a_name():
    assert choose(groups=1, servers=0, cores=3) == Setup(None, 1, 3, 0, 1)
    assert choose(groups=4, cores=3) == Setup(None, 4, 1, 1, 1), "groups need a server"
    assert choose(groups=6, workers=2, servers=6, servers_per_group=2).server_groups == 3


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_neighbouring_groups_share_a_server_group(server_groups, each, size):
    setup = choose(groups=server_groups * each, workers=1, servers=server_groups * size, servers_per_group=size)
    found = [setup.server_group_of(group) for group in range(setup.groups)]
    assert found == sorted(found)
    assert all(found.count(k) == each for k in range(server_groups))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"framework": "x"}, "expected one of sandblaster, allreduce"),
        ({"framework": "sandblaster", "groups": 2}, "--groups 2 contradicts --framework sandblaster"),
        ({"framework": "allreduce", "servers": 1}, "--servers 1 contradicts --framework allreduce .*: expected 0;"),
        ({"framework": "downpour", "groups": 1}, "expected 2 to 256"),
        ({"framework": "downpour", "servers": 2, "servers_per_group": 1}, "has 1 server group, but .* make 2"),
        ({"framework": "hogwild", "servers": 2}, "expected 1;"),
        ({"framework": "hogwild", "staleness": 2}, "several groups at one server group with a lock"),
        ({"framework": "distributed-hogwild", "groups": 4, "servers": 2}, "has 4 server groups, but .* make 1"),
        ({"groups": 2, "servers": 0}, "2 groups but no server: groups meet only at servers"),
        ({"groups": 0}, "--groups 0, expected a whole number above 0"),
        ({"servers": -1}, "--servers -1, expected"),
        ({"groups": 2, "servers": 3, "servers_per_group": 2}, "cannot be cut into groups"),
        ({"groups": 3, "servers": 2, "servers_per_group": 1}, "cannot be shared out evenly among 2 server groups"),
        ({"groups": 2, "staleness": 0}, "--staleness 0, expected a number of updates above 0"),
        ({"groups": 1, "servers": 1, "staleness": 2}, "several groups at one server group"),
        ({"groups": 200, "workers": 2}, "at most 256 workers and servers in all"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(options, says):
    with pytest.raises(ConfigError, match=says):
        choose(options.pop("framework", None), cores=2, **options)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=100), st.integers(1, 4))
def test_parts_are_layers_or_neighbours_and_every_server_has_its_share(layers, num_servers):
    parts, servers = bundles_of(layers, num_servers)
    assert [k for part in parts for k in part] == list(range(len(layers)))
    assert len(parts) <= MAX_BUNDLES
    assert all(parts)
    if len(layers) <= MAX_BUNDLES:
        assert len(parts) == len(layers)
    assert set(servers) == set(range(min(num_servers, len(parts))))


def test_where_a_group_stands_is_read_as_it_was_written():
    standing = Standing(1, 2, 0, [[{"tcp": "tcp://a:1"}]], None, lock=True, token="secret")
    assert Standing.of(standing.text()) == standing


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"group": 1}'])
def test_a_standing_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError, match="EVENSTEP_STANDING cannot be read"):
        Standing.of(text)
