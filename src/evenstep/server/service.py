"""Requests to replies, the same for every transport.

A transport reads the fields of a request, and asks `Service.admit` before it reads any tensor: that checks the token,
the verb, the sizes. Then it reads the head of the tensors and asks `Call.expect`, which checks names, dtypes and shapes
and gives memory to read the data into. At last `Call.run` does it. Each of these raises RefusedError with one sentence,
and then nothing has changed.
"""

import hmac
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evenstep.core.errors import RefusedError
from evenstep.server import together
from evenstep.server.images import Image
from evenstep.server.incoming import Incoming, integer
from evenstep.server.limits import Limits
from evenstep.server.meetings import Meetings
from evenstep.server.recipes import state_of
from evenstep.server.rooms import Intake, Room
from evenstep.server.rounds import Contribution
from evenstep.server.slices import LAYOUT
from evenstep.server.status import without_lists
from evenstep.server.store import Pending, Store, View
from evenstep.server.wire import KEPT_BYTES, Head, Layout, encode, fresh

__all__ = ["VERBS", "Call", "Reply", "Service"]

_WITH_TENSORS = ("put", "update", "stage")
_MAX_NAME = 200
_MAX_MEETING = 256
_CHECKED = 256
_INTAKE_BYTES = 8 << 20  # of updates may be received at once, or one copy of the parameters if that is more
log = logging.getLogger("evenstep.server")


@dataclass
class Reply:
    """What to send back.

    Attributes:
        fields: As JSON.
        parts: Buffers that follow, in order; valid until `close`.
        view: What they lie in.
        image: Where the other side reads them by itself, instead of the parts.
        image_bytes: How much it reads there.
    """

    fields: dict[str, Any]
    parts: list[memoryview] = field(default_factory=list)
    view: View | None = None
    image: Image | None = None
    image_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """How many bytes of tensors follow."""
        return sum(len(part) for part in self.parts)

    def close(self) -> None:
        """All is sent."""
        if self.view is not None:
            self.view.close()


class Service:
    """What all transports of a server share.

    Args:
        store: The state.
        limits: What strangers may cost.
        token: What every request must bring; None: nothing.
    """

    def __init__(self, store: Store, limits: Limits, token: str | None) -> None:
        self.store, self.limits = store, limits
        self._token = token.encode() if token is not None else None
        self.intake = Intake()
        self.meetings = Meetings()
        self._lock = threading.Lock()
        self._spare: list[Room] = []
        self._checked: dict[Any, Any] = {}
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.refusals: defaultdict[int, int] = defaultdict(int)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes_in = self.bytes_out = 0
        self.started_s = time.monotonic()

    @property
    def guarded(self) -> bool:
        """Whether every request must bring a token."""
        return self._token is not None

    def check_token(self, token: str | None) -> None:
        """Let nobody in who does not know it.

        Raises:
            RefusedError: The token is missing or wrong; both take the same time.
        """
        if self._token is not None and not hmac.compare_digest((token or "").encode(errors="replace"), self._token):
            raise RefusedError("the token is missing or wrong; give the one that the server printed at its start", 401)

    def admit(self, verb: str, fields: Mapping[str, Any], body_bytes: int, token: str | None) -> "Call":
        """Check a request by its fields alone.

        Raises:
            RefusedError: It is refused.
        """
        self.check_token(token)
        if verb not in VERBS:
            raise RefusedError(f"there is no verb {str(verb)[:40]!r}; expected one of {', '.join(VERBS)}", 404)
        if body_bytes and verb not in _WITH_TENSORS:
            raise RefusedError(f"'{verb}' takes no tensors but {body_bytes} bytes follow")
        if body_bytes > self.limits.body_bytes:
            raise RefusedError(f"{body_bytes} bytes of tensors, expected at most {self.limits.body_bytes}", 413)
        return Call(self, verb, fields, body_bytes)

    def incoming(self, layout: Layout, fields: Mapping[str, Any], head: Head) -> Incoming:
        """What an update will be; whoever sent the like of it before need not be checked again."""
        incoming = Incoming.read(layout, fields)
        key = (layout, head, incoming.spans, incoming.num_shards, incoming.buffers)
        places = self._checked.get(key)
        if places is None:
            places = incoming.check(head)
            if len(self._checked) >= _CHECKED:
                self._checked.clear()
            self._checked[key] = places
        incoming.places = places
        return incoming

    def spare(self, num_bytes: int) -> Room:
        """Memory for so many bytes, from an earlier update if there is some: fresh pages take time."""
        with self._lock:
            for n, room in enumerate(self._spare):
                if len(room.data) == max(num_bytes, 1):
                    return self._spare.pop(n)
        return Room(fresh(num_bytes))

    def recycle(self, room: Room) -> None:
        """Keep memory for the next update, unless a tensor is still made of it."""
        with self._lock:
            held = sum(len(other.data) for other in self._spare) + len(room.data)
            if (not self._spare or held <= KEPT_BYTES) and room.is_free(lasting=self.store.keeps_no_update):
                self._spare.append(room)

    def status(self) -> dict[str, Any]:
        """Everything that people may want to see, as JSON: what the page shows, and what Prometheus gets."""
        status = {**self.store.status(), **together.about(self.store)}
        with self._lock:
            return {
                **status,
                "uptime_s": round(time.monotonic() - self.started_s, 3),
                "received_bytes": self.bytes_in,
                "sent_bytes": self.bytes_out,
                "requests": dict(self.counts),
                "request_seconds": dict(self.seconds),
                "refused": {str(status): count for status, count in self.refusals.items()},
            }

    def figures(self) -> dict[str, Any]:
        """The status without its lists of parameters and of what happened: for a log."""
        return without_lists(self.status())

    def finished(self, verb: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count a request."""
        with self._lock:
            self.counts[verb] += 1
            self.seconds[verb] += seconds
            self.bytes_in += bytes_in
            self.bytes_out += bytes_out

    def refused(self, error: RefusedError) -> dict[str, Any]:
        """The fields of a reply to a request that was refused."""
        with self._lock:
            self.refusals[error.status] += 1
        log.info("refused %d: %s", error.status, str(error))
        return {"status": error.status, "error": str(error)}


class Call:
    """One request, from its fields to its reply."""

    def __init__(self, service: Service, verb: str, fields: Mapping[str, Any], body_bytes: int) -> None:
        self._service, self._store = service, service.store
        self.verb, self._fields, self.body_bytes = verb, fields, body_bytes
        self._head: Head | None = None
        self._incoming: Incoming | None = None
        self._taken = self._placed_bytes = 0
        self._room: Room | None = None
        self._spare: Room | None = None
        self._begin_s = time.monotonic()

    def check(self, head: Head) -> None:
        """Check what the tensors will be.

        Raises:
            RefusedError: They are not what this request may carry.
        """
        layout = self._store.layout
        if self.verb != "stage":
            together.check_alone(self._store, self._fields)
        if self._puts:
            if layout is not None:
                if not self._fields.get("force") and not together.is_again(self._store, self._fields):
                    raise RefusedError(f"the parameters were put by '{self._store.owner}' already", 409)
                layout.check_whole({name: spec for name, spec in head.specs.items() if name != LAYOUT})
        else:
            if layout is None:
                raise RefusedError("nothing was put yet, so there is nothing to update", 409)
            self._incoming = self._service.incoming(layout, self._fields, head)

    @property
    def _puts(self) -> bool:
        return self.verb == "put" or (self.verb == "stage" and self._fields.get("kind") == "put")

    def expect(self, head: Head) -> memoryview:
        """Check what the tensors will be; return a writable buffer for their data. May block until there is room.

        Raises:
            RefusedError: They are not what this request may carry, or others take all the room.
        """
        self.check(head)
        layout = self._store.layout
        if self.verb == "update" and layout is not None and self._store.options.staleness != 0:
            wait_s = self._service.limits.wait_s
            self._service.intake.take(head.data_bytes, max(layout.num_bytes, _INTAKE_BYTES), wait_s)
            self._taken = head.data_bytes
        self._spare = self._service.spare(head.data_bytes)
        self._head, self._room = head, self._spare
        return self._spare.data[: head.data_bytes]

    def place(self, head: Head, room: Room) -> None:
        """The data of tensors that were checked is in others' memory."""
        self._head, self._room, self._placed_bytes = head, room, head.data_bytes

    def run(self) -> Reply:
        """Do it. May block for as long as the limits say.

        Raises:
            RefusedError: It is refused; nothing has changed.
            ServerError: The server cannot go on.
        """
        if self.verb in _WITH_TENSORS and self._head is None:
            raise RefusedError(f"'{self.verb}' came without tensors")
        reply = _ACTIONS[self.verb](self)
        reply.fields.setdefault("status", 200)
        return reply

    def close(self, reply: Reply | None) -> None:
        """The request is over, well or not."""
        service = self._service
        if self._taken:
            service.intake.give(self._taken)
            self._taken = 0
        spare, self._spare, self._room, self._head = self._spare, None, None, None
        if spare is not None:
            service.recycle(spare)
        seconds, sent_bytes = time.monotonic() - self._begin_s, 0
        if reply is not None:
            sent_bytes = reply.num_bytes + reply.image_bytes
            reply.close()
        service.finished(self.verb, seconds, self.body_bytes + self._placed_bytes, sent_bytes)

    def _worker(self) -> str:
        name = self._fields.get("worker")
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise RefusedError(f"worker={str(name)[:40]!r}, expected a name of at most {_MAX_NAME} characters")
        return name

    def _wait_s(self) -> float:
        value = self._fields.get("wait_s", 0.0)
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise RefusedError(f"wait_s={str(value)[:40]!r}, expected a number of seconds")
        return min(float(value), self._service.limits.wait_s)

    def _register(self) -> Reply:
        worker = self._worker()
        self._store.register(worker, together.session_of(self._fields))
        last = self._store.workers.acknowledged.get(worker)
        options = self._store.options
        return Reply(
            {
                "sequence": last.sequence if last else 0,
                "staleness": options.staleness,
                "lease_s": options.lease_s,
                "version": self._store.version,
                **together.about(self._store),
            }
        )

    def _leave(self) -> Reply:
        self._store.leave(self._worker())
        return Reply({})

    def _put(self) -> Reply:
        assert self._head is not None, "run has looked"
        assert self._room is not None, "it came with the head"
        buffers = self._fields.get("buffers", [])
        if not isinstance(buffers, list) or not all(name in self._head.specs for name in buffers):
            raise RefusedError("buffers is no list of tensors that were put")
        tensors = self._room.tensors(self._head)
        slices = together.slices_of(self._store, tensors)
        version = self._store.put(
            tensors, self._worker(), force=bool(self._fields.get("force")), buffers=buffers, slices=slices,
            sequence=integer(self._fields, "sequence", 0), session=together.session_of(self._fields),
            recipe=self._fields.get("optimizer"),
        )  # fmt: skip
        return Reply({"version": version})

    def _stage(self) -> Reply:
        assert self._head is not None, "run has looked"
        assert self._room is not None, "it came with the head"
        tensors = self._kept(self._room.tensors(self._head))
        part = Contribution(tensors) if self._incoming is None else self._incoming.contribution(tensors)
        return Reply(together.stage(self._store, self._worker(), self._fields, part))

    def _kept(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that the store may hold: not where the client will write again."""
        if self._spare is not None or self._store.keeps_no_update:
            return tensors
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def _get(self) -> Reply:
        fields = self._fields
        names = fields.get("names")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise RefusedError("names is no list of names")
        if fields.get("optimizer"):
            return self._get_optimizer()
        since = integer(fields, "since", 0) if fields.get("since") is not None else None
        view = self._store.get(names, min_version=integer(fields, "min_version", 0), since=since, wait_s=self._wait_s())
        if view is None:
            return Reply({"status": 202, "pending": True, "version": self._store.version})
        reply = Reply({"version": view.version}, view=view)
        if fields.get("versions"):
            reply.fields["versions"] = view.versions
        if fields.get("place_only"):
            return self._in_place(reply, view)
        tensors = view.tensors
        if len(tensors) == len(view.image.tensors) and not fields.get("bfloat16"):
            reply.parts = view.image.parts
            return reply
        if fields.get("bfloat16"):
            wide = (torch.float32, torch.float64)
            tensors = {name: t.bfloat16() if t.dtype in wide else t for name, t in tensors.items()}
        reply.parts = encode(tensors)
        return reply

    def _get_optimizer(self) -> Reply:
        """The state of the optimizer, all of one version."""
        if self._fields.get("place_only"):
            raise RefusedError("the optimizer's state lies in no shared memory; ask for it over tcp")
        with self._store.exclusively():
            tensors, values = state_of(self._store.optimizer, self._store.state.parameters)
            reply = Reply({"version": self._store.version, "values": values})
            reply.parts = encode({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})
        return reply

    def _in_place(self, reply: Reply, view: View) -> Reply:
        """For a client that maps our memory: only say where."""
        layout = self._store.layout
        assert layout is not None, "there is a view"
        reply.image, reply.image_bytes = view.image, sum(tensor.nbytes for tensor in view.tensors.values())
        reply.fields |= {"image": view.image.number, "writable": not self._store.options.lock}
        if len(view.tensors) < len(layout.specs):
            reply.fields["names"] = list(view.tensors)
        if self._fields.get("layout"):
            reply.fields["layout"] = layout.packed()
        return reply

    def _update(self) -> Reply:
        assert self._head is not None, "run has looked"
        assert self._room is not None, "it came with the head"
        assert self._incoming is not None, "it was made with the head"
        fields = self._fields
        kind = fields.get("kind", "gradient")
        base = integer(fields, "base", 0) if fields.get("base") is not None else None
        part = self._incoming.contribution(self._kept(self._room.tensors(self._head)))
        sequence = integer(fields, "sequence", 0, 1)
        session = together.session_of(fields)
        found = self._store.update(
            self._worker(), sequence, str(kind), part, base=base, wait_s=self._wait_s(), session=session
        )
        return self._acknowledgement(found)

    def _wait(self) -> Reply:
        if "sequence" in self._fields:
            sequence = integer(self._fields, "sequence", 0, 1)
            return self._acknowledgement(self._store.wait(self._worker(), sequence, self._wait_s()))
        allowed = self._store.wait_turn(self._worker(), self._wait_s())
        return Reply({"status": 200 if allowed else 202, "pending": not allowed})

    def _order(self) -> Reply:
        return Reply(together.order(self._store, self._fields, self._wait_s()))

    def _pause(self) -> Reply:
        return Reply(together.pause(self._store, self._fields))

    def _meet(self) -> Reply:
        fields = self._fields
        tag, value = str(fields.get("tag"))[:_MAX_NAME], fields.get("value")
        count = integer(fields, "count", 1, 1, _MAX_MEETING)
        there, found = self._service.meetings.meet(tag, self._worker(), value, count, self._wait_s())
        if there:
            return Reply({"found": found})
        return Reply({"status": 202, "pending": True, "here": sorted(found)})

    def _flush(self) -> Reply:
        done = self._store.flush(self._wait_s())
        return Reply({"status": 200 if done else 202, "pending": not done})

    def _changed(self) -> Reply:
        names = self._fields.get("names", [])
        if not isinstance(names, list):
            raise RefusedError("names is no list of names")
        return Reply({"version": self._store.changed_elsewhere(self._worker(), map(str, names))})

    def _acknowledgement(self, found: Any) -> Reply:
        if isinstance(found, Pending):
            return Reply({"status": 202, "pending": True, "version": found.version})
        reply: dict[str, Any] = {"version": found.version}
        if any(note is not None for note in found.notes):
            reply["notes"] = found.notes
        if self._store.place.count > 1:
            reply |= together.decided(self._store, self._fields)
        return Reply(reply)

    def _status(self) -> Reply:
        return Reply(self._service.status())

    def _slice(self) -> Reply:
        slices = self._store.slices
        layout = slices.layout.packed() if slices is not None and self._fields.get("layout") else None
        return Reply({**together.about(self._store), "layout": layout})


_ACTIONS: dict[str, Callable[[Call], Reply]] = {
    "register": Call._register,
    "leave": Call._leave,
    "put": Call._put,
    "get": Call._get,
    "update": Call._update,
    "wait": Call._wait,
    "changed": Call._changed,
    "status": Call._status,
    "slice": Call._slice,
    "stage": Call._stage,
    "order": Call._order,
    "pause": Call._pause,
    "meet": Call._meet,
    "flush": Call._flush,
}
VERBS = tuple(_ACTIONS)
