"""What a server may be asked to be."""

import pytest
from torch import nn

from evenstep.core.errors import ConfigError
from evenstep.server import ParameterServer
from evenstep.server.hosting.config import ServerConfig

HERE, ELSEWHERE = ["127.0.0.1", "localhost", "::1", "127.9.9.9"], ["0.0.0.0", "10.0.0.7", "example.org", "::"]


@pytest.mark.parametrize("host", HERE + ELSEWHERE)
def test_a_token_is_made_wherever_others_can_reach(host):
    loopback = host in HERE
    assert ServerConfig(host=host).on_loopback == loopback
    server = ParameterServer(nn.Linear(1, 1), host=host)
    assert (server.token is None) == loopback
    server.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transports": ("pigeon",)}, "expected some of http, tcp, memory"),
        ({"transports": ()}, "expected some of http, tcp, memory"),
        ({"port": 65535}, "expected a number from 0 to 65534"),
        ({"servers": 0}, "expected a whole number from 1 to 64"),
        ({"snapshot_every": 0}, "expected a whole number above 0"),
        ({"log_every_s": 0.0}, "expected a number of seconds above 0"),
        ({"durable": True}, "durable=True needs a directory"),
        ({"set_aside": True}, "set_aside=True is for a directory"),
        ({"lock": False}, "it needs staleness=None"),
        ({"lock": False, "staleness": None, "durable": True, "directory": "x"}, "that cannot be durable"),
        ({"keyfile": "x"}, "TLS needs both"),
        ({"token": ""}, "must be printable ASCII"),
        ({"token": "a\nb"}, "must be printable ASCII"),
        ({"staleness": -1}, "expected 0, a number of updates, or None"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(options, words):
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**options)
