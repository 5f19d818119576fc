"""Which port is asked for, and what is said if there can be no page."""

import socket

import pytest

from evenstep.core.errors import ConfigError
from evenstep.page import process
from evenstep.page.process import PageProcess, check_port


@pytest.mark.parametrize(("value", "port"), [(False, None), (None, None), (True, 0), (0, 0), (8080, 8080)])
def test_a_page_is_asked_for_by_true_or_a_port(value, port):
    assert check_port(value) == port


@pytest.mark.parametrize("value", [-1, 65536, "8080", 1.5])
def test_what_is_no_port_is_one_sentence(value):
    with pytest.raises(ConfigError, match=r"page=.*, expected True, or a port from 0 \(any\) to 65535"):
        check_port(value)


def test_a_port_that_is_taken_and_a_package_that_is_missing_are_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="Address already in use"):
        PageProcess(taken.getsockname()[1], "Run(page=...)")
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Run\(page=\.\.\.\) needs starlette: pip install 'evenstep\[server\]'"):
        PageProcess(0, "Run(page=...)")
