"""The options of a server: one frozen value, checked before anything is started."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.core.errors import ConfigError
from evenstep.server.service.limits import Limits
from evenstep.server.store.options import StoreOptions

__all__ = ["TRANSPORTS", "ServerConfig"]

MAX_SERVERS = 64
TRANSPORTS = ("http", "tcp", "memory")


@dataclass(frozen=True)
class ServerConfig:
    """The options of a server.

    Attributes:
        staleness: 0: synchronous. s: a worker may be at most s updates ahead of the slowest. None: asynchronous.
        lock: False: clients in shared memory change the parameters themselves (hogwild); needs staleness=None.
        workers: How many workers there must be at least before a synchronous update is complete.
        host: Where to listen. Anything but loopback needs a token.
        port: 0 for any free one. If there are both, HTTP has this one and the raw socket the next.
        transports: Some of "http", "tcp", "memory".
        token: The secret that every request must carry. None: none on loopback, otherwise one is generated.
        certfile: For TLS.
        keyfile: Its key, if it is not in the same file.
        directory: Where snapshots go; a server that finds one there resumes from it.
        snapshot_every: Updates between two snapshots.
        durable: Write every update to a log on disk before it is acknowledged.
        set_aside: Start even if the log cannot be replayed, and keep the rest of it in a separate file.
        servers: How many processes share the parameters; each has its own transports, on the next ports.
        lease_s: After how long without a sign of life a worker is dropped.
        reject_nonfinite: Refuse updates that hold an infinity or NaN.
        log_every_s: How often a server in the foreground writes its figures to the log; None: only events.
        limits: What strangers may cost.

    Raises:
        ConfigError: Something makes no sense.
    """

    staleness: int | None = 0
    lock: bool = True
    workers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    transports: tuple[str, ...] = TRANSPORTS
    token: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    directory: str | Path | None = None
    snapshot_every: int = 1000
    durable: bool = False
    set_aside: bool = False
    servers: int = 1
    lease_s: float = 30.0
    reject_nonfinite: bool = False
    log_every_s: float | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Check."""
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown or not self.transports:
            raise ConfigError(f"transports={self.transports!r}, expected some of {', '.join(TRANSPORTS)}")
        if not isinstance(self.port, int) or not 0 <= self.port < 65535:
            raise ConfigError(f"port={self.port!r}, expected a number from 0 to 65534")
        if not isinstance(self.servers, int) or not 1 <= self.servers <= MAX_SERVERS:
            raise ConfigError(f"servers={self.servers!r}, expected a whole number from 1 to {MAX_SERVERS}")
        if self.snapshot_every < 1:
            raise ConfigError(f"snapshot_every={self.snapshot_every!r}, expected a whole number above 0")
        if self.log_every_s is not None and not self.log_every_s > 0:
            raise ConfigError(f"log_every_s={self.log_every_s!r}, expected a number of seconds above 0")
        self._check_directory()
        if self.keyfile is not None and self.certfile is None:
            raise ConfigError("keyfile without certfile; TLS needs both")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise ConfigError("the token must be printable ASCII, and not empty")
        self.options()

    def _check_directory(self) -> None:
        if self.durable and self.directory is None:
            raise ConfigError("durable=True needs a directory for its log and snapshots: directory=...")
        if self.set_aside and self.directory is None:
            raise ConfigError("set_aside=True is for a directory with a log that cannot be replayed: directory=...")
        if not self.lock and self.durable:
            raise ConfigError("lock=False lets clients change parameters without the server; that cannot be durable")

    def options(self) -> StoreOptions:
        """The options of the store."""
        return StoreOptions(self.staleness, self.lock, self.workers, self.lease_s, self.reject_nonfinite)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
