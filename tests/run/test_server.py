import pytest

import evenstep
from evenstep import ConfigError, Server

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"address": 7000}, "Server\\(7000\\); expected an address"),
        ({"address": ""}, "Server\\(''\\); expected an address"),
        ({"update_every": 0}, "update_every=0, expected a number of batches above 0, or 'epoch'"),
        ({"update_every": "day"}, "update_every='day', expected"),
        ({"update_every": 2.0}, "update_every=2.0, expected"),
        ({"update_every": 2, "aggregate": True}, "sends the update of every batch; update_every=2 does not"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_begun(arguments, said):
    with pytest.raises(ConfigError, match=said):
        Server(**{"address": URL, **arguments})


@pytest.mark.parametrize(
    ("options", "together"),
    [
        ({}, True),
        ({"staleness": None}, False),
        ({"update_every": "epoch"}, False),
        ({"aggregate": False}, False),
        ({"staleness": None, "aggregate": True}, True),
    ],
)
def test_workers_of_a_machine_are_one_to_the_server_where_that_changes_no_bit_or_as_said(options, together):
    assert Server(URL, **options).together is together


def test_an_address_is_a_server_with_the_defaults_and_anything_else_is_refused():
    with pytest.raises(evenstep.EvenstepError, match=r"127\.0\.0\.1:1"):
        evenstep.Run(server=URL, timeout_s=0.5)
    with pytest.raises(ConfigError, match=r"Run\(server=7000\); expected an evenstep\.Server, or its address"):
        evenstep.Run(server=7000)
