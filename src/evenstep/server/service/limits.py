"""How much of a server strangers may use: one frozen value."""

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """How much of a server strangers may use.

    Attributes:
        body_bytes: The longest body of a request.
        fields_bytes: The longest head of a request.
        connections: How many at once, for each transport; at most half of them have not been admitted yet.
        greeting_s: How long a connection may take until its first request is admitted.
        wait_s: The longest wait inside the server; to wait longer, a client asks again.
        idle_s: How long a transfer may take, plus a second for every `pace_bytes`.
        pace_bytes: The slowest pace of a transfer, in bytes for each second.
    """

    body_bytes: int = 4 << 30
    fields_bytes: int = 1 << 20
    connections: int = 256
    greeting_s: float = 10.0
    wait_s: float = 10.0
    idle_s: float = 30.0
    pace_bytes: int = 1 << 20

    def transfer_s(self, num_bytes: int) -> float:
        """How long a transfer of this size may take."""
        return self.idle_s + num_bytes / self.pace_bytes
