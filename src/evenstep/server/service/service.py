"""Turning requests into replies, the same for every transport.

A transport reads the fields of a request, and calls `Service.admit` before it reads any tensor: that checks the token,
the verb, the fields and sizes. Then it reads the head of the tensors and calls `ServiceCall.expect`, which checks
names, dtypes and shapes and gives memory to read the data into. Finally `ServiceCall.run` does it. Each of these may
raise RefusedError with one sentence, and then nothing has changed.
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

from evenstep.core.errors import RefusedError, ServerError
from evenstep.server.service import sliced
from evenstep.server.service.contributions import Incoming
from evenstep.server.service.limits import Limits
from evenstep.server.service.meetings import Appointments
from evenstep.server.service.requests import (
    CarryOrder,
    Changed,
    Flush,
    Get,
    Leave,
    Meet,
    Pause,
    Put,
    Register,
    Request,
    Slice,
    StageUpdate,
    Status,
    Update,
    Wait,
    parse,
)
from evenstep.server.service.update_memory import UpdateMemory
from evenstep.server.store.commits import First
from evenstep.server.store.deciding import Pending
from evenstep.server.store.images import ServerImage, View
from evenstep.server.store.optimizers import state_of
from evenstep.server.store.rounds import Contribution
from evenstep.server.store.status import without_lists
from evenstep.server.store.store import Store
from evenstep.server.store.workers import Acknowledged
from evenstep.server.wire.areas import Area
from evenstep.server.wire.slices import LAYOUT
from evenstep.server.wire.tensors import ParameterLayout, TensorHead, encode

__all__ = ["Reply", "Service", "ServiceCall"]

_WITH_TENSORS = (Put, Update, StageUpdate)
_CHECKED = 256
_INTAKE_BYTES = 8 << 20  # of updates may be received at once, or one copy of the parameters if that is more
log = logging.getLogger("evenstep.server")


@dataclass
class Reply:
    """What to send back.

    Attributes:
        fields: As JSON.
        parts: Buffers that follow, in order; valid until `close`.
        view: The view that holds them.
        image: Where the other side reads them itself, instead of the parts.
        image_bytes: How much it reads there.
    """

    fields: dict[str, Any]
    parts: list[memoryview] = field(default_factory=list)
    view: View | None = None
    image: ServerImage | None = None
    image_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """How many bytes of tensors follow."""
        return sum(len(part) for part in self.parts)

    def close(self) -> None:
        """Release what was sent."""
        if self.view is not None:
            self.view.close()


class Service:
    """What all transports of a server share.

    Args:
        store: The state.
        limits: How much strangers may use.
        token: The secret that every request must carry; None: none.

    Attributes:
        watch: Called after every request, in the thread of its connection: with its verb, who sent it ("" if it does
            not say), and when it began and ended by `time.monotonic`.
    """

    def __init__(self, store: Store, limits: Limits, token: str | None) -> None:
        self.watch: Callable[[str, str, float, float], None] | None = None
        self.store, self.limits = store, limits
        self._token = token.encode() if token is not None else None
        self.memory = UpdateMemory()
        self.meetings = Appointments()
        self._lock = threading.Lock()
        self._checked: dict[Any, Any] = {}
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.refusals: defaultdict[int, int] = defaultdict(int)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes_in = self.bytes_out = 0
        self.started_s = time.monotonic()

    @property
    def guarded(self) -> bool:
        """Whether every request must carry a token."""
        return self._token is not None

    def check_token(self, token: str | None) -> None:
        """Refuse a request without the right token.

        Raises:
            RefusedError: The token is missing or wrong; both take the same time.
        """
        if self._token is not None and not hmac.compare_digest((token or "").encode(errors="replace"), self._token):
            raise RefusedError("the token is missing or wrong; give the one that the server printed at its start", 401)

    def admit(self, verb: str, fields: Mapping[str, Any], body_bytes: int, token: str | None) -> "ServiceCall":
        """Check a request by its fields alone.

        Raises:
            RefusedError: It is refused.
        """
        self.check_token(token)
        if body_bytes > self.limits.body_bytes:
            raise RefusedError(f"{body_bytes} bytes of tensors, expected at most {self.limits.body_bytes}", 413)
        request = parse(verb, fields)
        if body_bytes and not isinstance(request, _WITH_TENSORS):
            raise RefusedError(f"'{verb}' takes no tensors but {body_bytes} bytes follow")
        return ServiceCall(self, verb, request, body_bytes)

    def incoming(self, layout: ParameterLayout, request: Update | StageUpdate, head: TensorHead) -> Incoming:
        """An update before its data have arrived. One of a form already checked is not checked again."""
        incoming = Incoming(layout, request)
        key = (head, incoming.form)
        places = self._checked.get(key)
        if places is None:
            places = incoming.check(head)
            if len(self._checked) >= _CHECKED:
                self._checked.clear()
            self._checked[key] = places
        incoming.places = places
        return incoming

    def status(self) -> dict[str, Any]:
        """Everything that people may want to see, as JSON: for the page, and for Prometheus."""
        status = {**self.store.status(), **sliced.about(self.store)}
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


class ServiceCall:
    """One request, from its fields to its reply."""

    def __init__(self, service: Service, verb: str, request: Request, body_bytes: int) -> None:
        self._service, self._store = service, service.store
        self.verb, self._request, self.body_bytes = verb, request, body_bytes
        self._head: TensorHead | None = None
        self._incoming: Incoming | None = None
        self._taken = self._placed_bytes = 0
        self._area: Area | None = None
        self._spare: Area | None = None
        self._begin_s = time.monotonic()

    @property
    def takes_tensors(self) -> bool:
        """Whether it carries tensors."""
        return isinstance(self._request, _WITH_TENSORS)

    def check(self, head: TensorHead) -> None:
        """Check what the tensors will be.

        Raises:
            RefusedError: They are not what this request may carry.
        """
        request, layout = self._request, self._store.layout
        if isinstance(request, Put | Update):
            sliced.check_alone(self._store, request.staged)
        if isinstance(request, Update) or (isinstance(request, StageUpdate) and request.kind != "put"):
            if layout is None:
                raise RefusedError("nothing was put yet, so there is nothing to update", 409)
            self._incoming = self._service.incoming(layout, request, head)
        elif isinstance(request, Put | StageUpdate) and layout is not None:
            if not request.force and not sliced.is_again(self._store, request):
                raise RefusedError(f"the parameters were put by '{self._store.state.owner}' already", 409)
            layout.check_whole({name: spec for name, spec in head.specs.items() if name != LAYOUT})

    def expect(self, head: TensorHead) -> memoryview:
        """Check what the tensors will be; return a writable buffer for their data. May block until there is room.

        Raises:
            RefusedError: They are not what this request may carry, or others take all the room.
        """
        self.check(head)
        layout = self._store.layout
        if isinstance(self._request, Update) and layout is not None and self._store.options.staleness != 0:
            wait_s = self._service.limits.wait_s
            self._service.memory.take(head.data_bytes, max(layout.num_bytes, _INTAKE_BYTES), wait_s)
            self._taken = head.data_bytes
        self._spare = self._service.memory.area(head.data_bytes)
        self._head, self._area = head, self._spare
        return self._spare.data[: head.data_bytes]

    def place(self, head: TensorHead, area: Area) -> None:
        """Note that the tensors were checked, and are in memory shared with the client."""
        self._head, self._area, self._placed_bytes = head, area, head.data_bytes

    def run(self) -> Reply:
        """Do the request. May block as long as the limits allow.

        Raises:
            RefusedError: It is refused; nothing has changed.
            ServerError: The server cannot go on.
        """
        if self._head is None and self.takes_tensors:
            raise RefusedError(f"'{self.verb}' came without tensors")
        try:
            reply = _ACTIONS[type(self._request)](self, self._request)
        except OSError as error:  # a transport would take it for a connection error
            log.exception("a request failed")
            raise ServerError(f"the server failed: {error}; its log says where") from error
        reply.fields.setdefault("status", 200)
        return reply

    def close(self, reply: Reply | None) -> None:
        """The request is over, whether or not it succeeded."""
        service = self._service
        if self._taken:
            service.memory.give(self._taken)
            self._taken = 0
        spare, self._spare, self._area, self._head = self._spare, None, None, None
        if spare is not None:
            service.memory.recycle(spare, lasting=self._store.keeps_no_update)
        end_s, sent_bytes = time.monotonic(), 0
        if reply is not None:
            sent_bytes = reply.num_bytes + reply.image_bytes
            reply.close()
        service.finished(self.verb, end_s - self._begin_s, self.body_bytes + self._placed_bytes, sent_bytes)
        if service.watch is not None:
            service.watch(self.verb, getattr(self._request, "worker", ""), self._begin_s, end_s)

    def _wait_s(self, wanted_s: float) -> float:
        return min(wanted_s, self._service.limits.wait_s)

    def _kept(self) -> dict[str, Tensor]:
        """The tensors that came, safe for the store to keep, check and write down.

        In shared memory the client may change them at any time; that is harmless only if they are read just once.
        """
        assert self._head is not None, "run refuses a request whose tensors did not come"
        assert self._area is not None, "expect and place set the head and the area together"
        tensors = self._area.tensors(self._head)
        if self._spare is not None or (self._store.keeps_no_update and self._store.looks_once):
            return tensors
        return {name: tensor.clone() for name, tensor in tensors.items()}

    # ---- workers ----

    def _register(self, request: Register) -> Reply:
        last = self._store.register(request.worker, request.session)
        options = self._store.options
        return Reply(
            {
                "sequence": last.sequence if last else 0,
                "staleness": options.staleness,
                "lease_s": options.lease_s,
                "version": self._store.version,
                **sliced.about(self._store),
            }
        )

    def _leave(self, request: Leave) -> Reply:
        self._store.leave(request.worker)
        return Reply({})

    def _meet(self, request: Meet) -> Reply:
        wait_s = self._wait_s(request.wait_s)
        there, found = self._service.meetings.meet(request.tag, request.worker, request.value, request.count, wait_s)
        if there:
            return Reply({"found": found})
        return Reply({"status": 202, "pending": True, "here": sorted(found)})

    # ---- parameters ----

    def _put(self, request: Put) -> Reply:
        tensors = self._kept()
        slices = sliced.slices_of(self._store, tensors)
        if not tensors.keys() >= set(request.buffers):
            raise RefusedError("buffers names tensors that were not put")
        first = First(tensors, request.worker, request.buffers, slices, request.optimizer)
        version = self._store.put(first, force=request.force, sequence=request.sequence, session=request.session)
        return Reply({"version": version})

    def _get(self, request: Get) -> Reply:
        if request.optimizer:
            return self._get_optimizer(request)
        view = self._store.readers.get(
            request.names, min_version=request.min_version, since=request.since, wait_s=self._wait_s(request.wait_s)
        )
        if view is None:
            return Reply({"status": 202, "pending": True, "version": self._store.version})
        reply = Reply({"version": view.version}, view=view)
        if request.versions:
            reply.fields["versions"] = view.versions
        if request.place_only:
            return self._in_place(reply, view, with_layout=request.layout)
        tensors = view.tensors
        if len(tensors) == len(view.image.tensors) and not request.bfloat16:
            reply.parts = view.image.parts
            return reply
        if request.bfloat16:
            wide = (torch.float32, torch.float64)
            tensors = {name: t.bfloat16() if t.dtype in wide else t for name, t in tensors.items()}
        reply.parts = encode(tensors)
        return reply

    def _get_optimizer(self, request: Get) -> Reply:
        """The state of the optimizer, all of one version."""
        if request.place_only:
            raise RefusedError("the optimizer's state lies in no shared memory; ask for it over tcp")
        with self._store.exclusively():
            tensors, values = state_of(self._store.state.optimizer, self._store.state.parameters)
            reply = Reply({"version": self._store.version, "values": values})
            reply.parts = encode({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()})
        return reply

    def _in_place(self, reply: Reply, view: View, *, with_layout: bool) -> Reply:
        """A reply that only says where the parameters are, for a client that maps our memory."""
        layout = self._store.layout
        assert layout is not None, "there is a view only if there is a layout"
        reply.image, reply.image_bytes = view.image, sum(tensor.nbytes for tensor in view.tensors.values())
        reply.fields |= {"image": view.image.number, "writable": not self._store.options.lock}
        if len(view.tensors) < len(layout.specs):
            reply.fields["names"] = list(view.tensors)
        if with_layout:
            reply.fields["layout"] = layout.packed()
        return reply

    # ---- updates ----

    def _update(self, request: Update) -> Reply:
        assert self._incoming is not None, "check sets it for every update"
        found = self._store.decider.update(
            request.worker, request.sequence, request.kind, self._incoming.contribution(self._kept()),
            base=request.base, wait_s=self._wait_s(request.wait_s), session=request.session,
        )  # fmt: skip
        return self._acknowledgement(found, request.since)

    def _wait(self, request: Wait) -> Reply:
        wait_s = self._wait_s(request.wait_s)
        if request.sequence is not None:
            return self._acknowledgement(self._store.decider.wait(request.worker, request.sequence, wait_s), -1)
        allowed = self._store.decider.wait_turn(request.worker, wait_s)
        return Reply({"status": 200 if allowed else 202, "pending": not allowed})

    def _changed(self, request: Changed) -> Reply:
        return Reply({"version": self._store.changed_elsewhere(request.worker, request.names)})

    def _acknowledgement(self, found: Acknowledged | Pending, since: int) -> Reply:
        if isinstance(found, Pending):
            return Reply({"status": 202, "pending": True, "version": found.version})
        reply: dict[str, Any] = {"version": found.version}
        if any(note is not None for note in found.notes):
            reply["notes"] = found.notes
        if self._store.place.count > 1:
            reply |= sliced.decided(self._store, since)
        return Reply(reply)

    # ---- several servers ----

    def _stage(self, request: StageUpdate) -> Reply:
        tensors = self._kept()
        part = Contribution(tensors) if self._incoming is None else self._incoming.contribution(tensors)
        return Reply(sliced.stage(self._store, request, part))

    def _order(self, request: CarryOrder) -> Reply:
        return Reply(sliced.order(self._store, request, self._wait_s(request.wait_s)))

    def _pause(self, request: Pause) -> Reply:
        return Reply({"version": self._store.pause(request.on)})

    def _flush(self, request: Flush) -> Reply:
        done = self._store.flush(self._wait_s(request.wait_s))
        return Reply({"status": 200 if done else 202, "pending": not done})

    def _slice(self, request: Slice) -> Reply:
        slices = self._store.commits.slices
        layout = slices.layout.packed() if slices is not None and request.layout else None
        return Reply({**sliced.about(self._store), "layout": layout})

    # ---- people ----

    def _status(self, request: Status) -> Reply:
        del request
        return Reply(self._service.status())


_ACTIONS: dict[type[Request], Callable[[ServiceCall, Any], Reply]] = {
    Register: ServiceCall._register,
    Leave: ServiceCall._leave,
    Meet: ServiceCall._meet,
    Put: ServiceCall._put,
    Get: ServiceCall._get,
    Update: ServiceCall._update,
    Wait: ServiceCall._wait,
    Changed: ServiceCall._changed,
    StageUpdate: ServiceCall._stage,
    CarryOrder: ServiceCall._order,
    Pause: ServiceCall._pause,
    Flush: ServiceCall._flush,
    Slice: ServiceCall._slice,
    Status: ServiceCall._status,
}
