"""What talks to parameter servers. Nothing of the servers themselves is imported here."""

from evenstep.server.client.addresses import connect
from evenstep.server.client.client import Client

__all__ = ["Client", "connect"]
