"""The public names are there."""

import evenstep.server


def test_the_public_names_are_found_where_they_are():
    for name in evenstep.server.__all__:
        assert getattr(evenstep.server, name).__name__ == name
    assert not hasattr(evenstep.server, "Relay")
