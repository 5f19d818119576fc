"""What the tests of servers share."""

import pytest

import certificates


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """The paths of a certificate for localhost, signed by itself, and of its key."""
    return certificates.make(tmp_path_factory.mktemp("tls"))
