"""From addresses to clients."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.server import connect


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://a:1", "http://nowhere", "tcp://", "tcp://a:1,ftp://b:2"])
def test_what_is_no_address_is_refused_before_anything_is_opened(url):
    with pytest.raises(ConfigError, match="is not the address of a server; expected http://host:port"):
        connect(url)


def test_authorities_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        connect("https://localhost:1", cafile=str(tmp_path / "nothing.pem"))
