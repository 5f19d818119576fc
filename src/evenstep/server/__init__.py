"""The parameter server: parameters with versions, kept by one process and trained by many.

from evenstep.server import ParameterServer, connect

with ParameterServer(model, torch.optim.SGD(model.parameters(), 0.1), staleness=None) as server:
    client = connect(server.url)
    parameters = client.get_parameters()
    version = client.update_parameters(gradients)
"""

from evenstep.server.client import Client
from evenstep.server.config import ServerConfig
from evenstep.server.connecting import connect
from evenstep.server.limits import Limits
from evenstep.server.server import ParameterServer

__all__ = ["Client", "Limits", "ParameterServer", "ServerConfig", "connect"]
