"""A machine that joins a run: it starts workers when the head asks for them, and reports what becomes of them.

`join` is the whole interface: `evenstep join HOST:PORT -n N` calls it, and other launchers may call it too, in the main
and only thread of a process (workers are forked from it):

    from evenstep.launch.agent import join
    code = join("10.0.0.1:7777", num_workers=4, token=token)

The agent decides nothing. When it no longer hears from the head it ends its workers at once, so that there are never
two runs that both go on.
"""

import hmac
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evenstep.core.children import signal_name
from evenstep.core.config import MAX_SHARDS
from evenstep.core.errors import ConfigError, PeerError, UnreachableError
from evenstep.core.output import say
from evenstep.core.signals import Signals
from evenstep.exchange.generations import Generation
from evenstep.launch.connection import Lost, MachineConnection
from evenstep.launch.door import PROTOCOL, proof_of, split_address
from evenstep.launch.job import Job
from evenstep.launch.likeness import likeness
from evenstep.launch.machine import End, Here
from evenstep.launch.trails import TrailPiece
from evenstep.launch.worker import warm_up
from evenstep.transport.bridge import Bridging
from evenstep.transport.segment import Segment

__all__ = ["join"]

_LOOK_S = 0.25
_ROWS_S = 0.5  # how often to report what the workers are doing
_ANSWER_S = 30.0
_AGAIN_S = 0.5  # between two attempts to reach the head


class _Agent:
    """Carries out what the head asks for, and reports to it as to a `Hears`."""

    def __init__(
        self, number: int, connection: MachineConnection, job: Job, segment: Segment, silence_s: float, *, traced: bool
    ) -> None:
        self._connection, self._silence_s = connection, silence_s
        name = socket.gethostname()
        self._here = Here(number, name, job, segment, self, machines=True, job_name="joined", traced=traced)
        self._places: set[int] = set()
        self._told_at = 0.0
        self._code: int | None = None
        self._signal: int | None = None

    def run(self) -> int:
        """Work until the head says that the run is over; returns the exit code of the run.

        Raises:
            Lost: The head is lost.
        """
        children, connection = self._here.children, self._connection
        with Signals(self._on_signal, signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals, children:
            children.watch(signals, signals.deliver)
            children.watch(connection, lambda: None)  # it is read below, in every turn
            while self._code is None and self._signal is None:
                now = time.monotonic()
                pause_s = 0.01 if connection.has_more else _LOOK_S
                children.turn(min([now + pause_s, *self._here.next_look]) - now)
                for message, data in connection.receive():
                    self._do(message, data)
                now = time.monotonic()
                self._here.look_after(now)
                self._tell_rows(now)
                connection.beat(now)
                if connection.is_silent(now, self._silence_s):
                    raise Lost(f"has said nothing for {self._silence_s:g} s")
        if self._signal is not None:
            say(f"{signal_name(self._signal)}: this machine has left the run, which goes on without it")
            return 128 + self._signal
        return self._code or 0

    def _on_signal(self, number: int) -> None:
        if number != signal.SIGHUP:
            self._signal = number

    def _tell_rows(self, now: float) -> None:
        if now - self._told_at >= _ROWS_S:
            self._told_at = now
            self._say("rows", rows={place: self._here.row_of(place) for place in self._places})

    # ---- what the head asks for ----

    def _do(self, message: dict[str, Any], data: bytes) -> None:
        here = self._here
        match message["do"]:
            case "start":
                here.start(message["place"], message["num_workers"])
                self._places.add(message["place"])
                self._say("started", place=message["place"], pid=here.pid_of(message["place"]))
            case "signal":
                here.signal(message["place"], message["number"])
            case "give up":
                here.give_up(message["place"], message["why"], leaves=message["leaves"])
            case "abort":
                here.abort(message["culprit"], message["why"])
            case "limit":
                here.limit(message["timeout_s"])
            case "announce":
                plan = message["bridging"]
                bridging = None if plan is None else Bridging(**{**plan, "store": tuple(plan["store"])})
                here.announce(Generation(**message["generation"]), bridging, lacks_state=message["lacks_state"])
            case "leave out":
                here.leave_out()
                self._say("journal", count=here.committed)
            case "journal":
                here.catch_up(message["begin"], data)
            case "end":
                self._code = message["code"]

    # ---- what it reports to the head ----

    def _say(self, what: str, data: bytes = b"", **fields: Any) -> None:
        self._connection.send({"say": what, **fields}, data)

    def heard(self, machine: int, place: int, kind: str, lines: Sequence[bytes]) -> None:
        """See `Hears`."""
        waits = kind == "events" and any(b'"waits"' in line for line in lines)
        self._say("heard", b"\n".join(lines), place=place, kind=kind, round=self._here.round if waits else 0)

    def did(self, machine: int, pieces: Sequence[TrailPiece], ahead_ns: int = 0) -> None:
        """See `Hears`."""
        for piece in pieces:
            self._say("did", piece.spans, place=piece.place, pid=piece.pid)

    def gave_up(self, machine: int, place: int, text: str, leaves: bool) -> None:
        """See `Hears`."""
        self._say("gave up", place=place, text=text, leaves=leaves)

    def ended(self, machine: int, place: int, end: End) -> None:
        """See `Hears`."""
        self._say("ended", place=place, end=asdict(end))

    def broke(self, machine: int, generation: int, culprit: int, text: str) -> None:
        """See `Hears`."""
        self._say("broke", generation=generation, culprit=culprit, text=text)


def join(
    address: str,
    num_workers: int,
    *,
    token: str = "",
    cafile: Path | None = None,
    wait_s: float = 30.0,
    rejoin_s: float = 0.0,
) -> int:
    """Add the workers of this machine to a run; returns the exit code of the run when it is over.

    Blocks for as long as the run lasts. Must be called in the main thread of a process that has no other threads, in a
    directory from which the script has the same path as on the head.

    Args:
        address: HOST:PORT of the head.
        num_workers: How many workers this machine offers.
        token: The secret that the head asks for.
        cafile: With TLS: the certificate that signed the head's, or the head's own if it is self-signed.
        wait_s: How long to wait for the head to start listening.
        rejoin_s: If the head is lost after that, how long to try to join it again, as a new machine.

    Raises:
        ConfigError: The head has refused this machine; the message says why.
        UnreachableError: Nothing listens there.
        PeerError: The head is lost; no worker of this machine is left.
    """
    where = split_address(address, "HOST:PORT")
    tls = _tls(cafile)
    warm_up()
    patience_s = wait_s
    while True:
        connection = _connect(where, tls, patience_s)
        with closing(connection):
            try:
                return _take_part(connection, num_workers, token)
            except Lost as error:
                why = f"the head at {address} {error}; the workers of this machine were ended"
                if rejoin_s <= 0:
                    raise PeerError(f"{why}; if the run is gone, evenstep run --resume continues it", 0) from error
                say(f"{why}; trying to join again for {rejoin_s:g} s")
                patience_s = rejoin_s


def _tls(cafile: Path | None) -> ssl.SSLContext | None:
    if cafile is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(cafile))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--cafile {cafile} cannot be used: {error.strerror or error}") from error


def _connect(where: tuple[str, int], tls: ssl.SSLContext | None, wait_s: float) -> MachineConnection:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            sock = socket.create_connection(where, timeout=max(min(5.0, deadline - time.monotonic()), 0.1))
            return MachineConnection(sock, tls, host=where[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"no head listens at {where[0]}:{where[1]} ({error.strerror or error}); start it there with "
                    f"`evenstep run --listen {where[0]}:{where[1]} SCRIPT`"
                ) from error
            time.sleep(_AGAIN_S)


def _take_part(connection: MachineConnection, num_workers: int, token: str) -> int:
    greeting, _ = connection.wait(_ANSWER_S)
    if greeting.get("protocol") != PROTOCOL:
        raise ConfigError(
            f"the head speaks protocol {greeting.get('protocol')}, expected {PROTOCOL}: install the same version of "
            "evenstep on every machine"
        )
    nonce = secrets.token_hex(16)
    proof = proof_of(token, "join", str(greeting["nonce"]))
    connection.send({"protocol": PROTOCOL, "proof": proof, "nonce": nonce})
    answer = _answer(connection)
    if not hmac.compare_digest(str(answer["proof"]).encode(), proof_of(token, "head", nonce).encode()):
        raise ConfigError("what listens there does not know the token, so it is not the head; check the address")
    connection.trust()
    said = answer["job"]
    job = _job(said, num_workers)
    alike = likeness(job.script, job.shards)
    connection.send({"name": socket.gethostname(), "workers": num_workers, "likeness": alike})
    number = int(_answer(connection)["welcome"])
    say(f"joined as machine {number} with {num_workers} worker{'s' if num_workers > 1 else ''}")
    with ExitStack() as stack:
        segment = stack.enter_context(closing(Segment.create(MAX_SHARDS)))
        return _Agent(number, connection, job, segment, said["silence_s"], traced=said["traced"]).run()


def _answer(connection: MachineConnection) -> dict[str, Any]:
    message, _ = connection.wait(_ANSWER_S)
    if "refused" in message:
        raise ConfigError(f"the head refuses this machine: {message['refused']}")
    return message


def _job(said: dict[str, Any], num_workers: int) -> Job:
    script: Path | str = said["script"] if said["is_module"] else Path(said["script"])
    return Job(
        script,
        tuple(said["args"]),
        num_workers,
        said["shards"],
        step_timeout_s=said["step_timeout_s"],
        resume=said["resume"],
        recheck=said["recheck"],
        tolerate_wrong=said["tolerate_wrong"],
    )
