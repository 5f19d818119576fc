"""Another machine of a run, as the head sees it: requests go there, reports of what happens come back."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from evenstep.exchange.generations import Generation
from evenstep.launch.connection import Lost, MachineConnection
from evenstep.launch.machine import End, Hears
from evenstep.launch.trails import TrailPiece
from evenstep.transport.bridge import Bridging

__all__ = ["There"]

_NOTHING = {  # the row of a worker that has reported nothing yet
    **{"step": 0, "shards": [0, 0], "shard": None, "waiting": False},
    **dict.fromkeys(("compute_s", "wait_s", "update_s", "exchange_s"), 0.0),
}


class There:
    """A machine that has joined: see `RunMachine`.

    Sending never raises: `turn` does so when the connection is lost, and with it the machine.

    Args:
        number: The number of the machine.
        name: Its host name.
        capacity: How many workers it has offered.
        connection: The connection to it.
        hears: Is told what happens there.

    Attributes:
        journal: How much of the journal it has while none of its workers is in a generation; None: one is.
    """

    def __init__(self, number: int, name: str, capacity: int, connection: MachineConnection, hears: Hears) -> None:
        self.number, self.name, self.capacity, self._round = number, name, capacity, 0
        self.connection, self._hears = connection, hears
        self.journal: int | None = 0
        self._pids: dict[int, int] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._left_out = True

    def _do(self, what: str, data: bytes = b"", **fields: Any) -> None:
        self.connection.send({"do": what, **fields}, data)

    @property
    def round(self) -> int:
        """See `RunMachine`."""
        return self._round

    # ---- requests to it ----

    def start(self, place: int, num_workers: int) -> None:
        """See `RunMachine`."""
        self._do("start", place=place, num_workers=num_workers)

    def signal(self, place: int, number: int) -> None:
        """See `RunMachine`."""
        self._do("signal", place=place, number=number)

    def give_up(self, place: int, why: str, *, leaves: bool = False) -> None:
        """See `RunMachine`."""
        self._do("give up", place=place, why=why, leaves=leaves)

    def abort(self, culprit: int, why: str) -> None:
        """See `RunMachine`."""
        self._do("abort", culprit=culprit, why=why)

    def limit(self, timeout_s: float | None) -> None:
        """See `RunMachine`."""
        self._do("limit", timeout_s=timeout_s)

    def announce(self, generation: Generation, bridging: Bridging | None, *, lacks_state: bool) -> None:
        """See `RunMachine`."""
        self.journal, self._left_out = None, False
        plan = None if bridging is None else asdict(bridging)
        self._do("announce", generation=asdict(generation), bridging=plan, lacks_state=lacks_state)

    def leave_out(self) -> None:
        """See `RunMachine`. It answers with how much of the journal it has."""
        if not self._left_out:
            self._left_out = True
            self._do("leave out")

    def bring(self, count: int, packed: bytes) -> None:
        """Send entries that bring its journal to `count` of them."""
        self._do("journal", packed, begin=self.journal)
        self.journal = count

    def end(self, code: int) -> None:
        """Tell it that the run is over."""
        self._do("end", code=code)

    def row_of(self, place: int) -> dict[str, Any]:
        """See `RunMachine`. It may be half a second old."""
        return self._rows.get(place, _NOTHING)

    def pid_of(self, place: int) -> int:
        """See `RunMachine`."""
        return self._pids.get(place, 0)

    # ---- what happens there ----

    def turn(self, now: float, silence_s: float) -> None:
        """Handle what it has reported, and let it know that this machine is alive.

        Raises:
            Lost: The machine is lost, or has been silent for too long.
        """
        for message, data in self.connection.receive():
            try:
                self._hear(message, data)
            except (KeyError, TypeError, ValueError) as error:
                raise Lost(f"sent a message that makes no sense ({error!r})") from error
        self.connection.beat(now)
        if self.connection.is_silent(now, silence_s):
            raise Lost(f"has said nothing for {silence_s:g} s")

    def _hear(self, message: dict[str, Any], data: bytes) -> None:
        match message["say"]:
            case "heard":
                self._round = max(self._round, message["round"])
                lines: Sequence[bytes] = data.split(b"\n")
                self._hears.heard(self.number, message["place"], message["kind"], lines)
            case "started":
                self._pids[message["place"]] = message["pid"]
            case "gave up":
                self._hears.gave_up(self.number, message["place"], message["text"], message["leaves"])
            case "ended":
                self._hears.ended(self.number, message["place"], End(**message["end"]))
            case "broke":
                self._hears.broke(self.number, message["generation"], message["culprit"], message["text"])
            case "rows":
                self._rows = {int(place): dict(row) for place, row in message["rows"].items()}
            case "did":
                piece = TrailPiece(message["place"], message["pid"], data)
                self._hears.did(self.number, [piece], self.connection.clock.ahead_ns)
            case "journal" if self._left_out:
                self.journal = message["count"]
