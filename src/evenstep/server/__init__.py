"""The parameter server: parameters with versions, kept by one process and trained by many.

from evenstep.server import ParameterServer, connect

with ParameterServer(model, torch.optim.SGD(model.parameters(), 0.1), staleness=None) as server:
    client = connect(server.url)
    parameters = client.get_parameters()
    version = client.update_parameters(gradients)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenstep.server.client import Client, connect
    from evenstep.server.hosting import Limits, ParameterServer, ServerConfig

__all__ = ["Client", "Limits", "ParameterServer", "ServerConfig", "connect"]


def __getattr__(name: str) -> Any:
    """Import only what is asked for: a worker that is a client needs nothing of the server."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "client" if name in ("Client", "connect") else "hosting"
    return getattr(import_module(f"{__name__}.{room}"), name)
