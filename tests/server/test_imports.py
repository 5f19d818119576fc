"""Who imports what: a client is small, and the public names are there."""

import subprocess
import sys

import evenstep.server

PROGRAM = """
import sys
import {module}
print(*sorted(name for name in sys.modules if name.startswith("evenstep.server.")))
"""


def imported_by(module):
    """The modules of the server that a fresh process has after an import."""
    text = PROGRAM.format(module=module)
    return subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout.split()


def test_a_run_imports_clients_and_nothing_of_the_server_side():
    found = imported_by("evenstep.run.run")
    rooms = {name.split(".")[2] for name in found}
    assert rooms == {"client", "wire"}, found
    assert len(found) <= 22, found


def test_the_public_names_are_found_where_they_are():
    for name in evenstep.server.__all__:
        assert getattr(evenstep.server, name).__name__ == name
    assert not hasattr(evenstep.server, "Relay")
