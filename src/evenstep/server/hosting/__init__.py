"""Running servers: in threads of one process, or in several processes."""

from evenstep.server.hosting.config import ServerConfig
from evenstep.server.hosting.server import ParameterServer
from evenstep.server.service.limits import Limits

__all__ = ["Limits", "ParameterServer", "ServerConfig"]
