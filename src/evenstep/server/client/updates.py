"""Sending an update to one server: when it is this worker's turn, and until it is applied."""

import time
from collections.abc import Mapping

from torch import Tensor

from evenstep.core.errors import RefusedError, UnreachableError
from evenstep.server.client.channels import Channel, Fields
from evenstep.server.client.connection import Connection, patience
from evenstep.server.client.memory import MemoryChannel

__all__ = ["await_turn", "deliver", "sendable", "subtract", "wait"]


def sendable(tensor: Tensor) -> Tensor:
    """A tensor that can be sent from its own memory."""
    if tensor.is_cpu and not tensor.requires_grad and tensor.is_contiguous():
        return tensor
    return tensor.detach().cpu().contiguous()


def wait(connection: Connection, deadline: float, **which: int) -> Fields:
    """Wait at the server for an update, or for this worker's turn; the reply may be that it is still pending."""
    fields = {"worker": connection.worker, "wait_s": patience(deadline), **which}
    return connection.ask("wait", fields, deadline, register=True)


def await_turn(connection: Connection, deadline: float) -> None:
    """Wait until this worker is not too far ahead of the slowest.

    Raises:
        UnreachableError: It still is at the deadline.
    """
    while wait(connection, deadline).get("pending"):
        if time.monotonic() >= deadline:
            raise UnreachableError(f"worker '{connection.worker}' gave up waiting for slower workers")


def deliver(connection: Connection, fields: Fields, tensors: Mapping[str, Tensor], deadline: float) -> Fields:
    """Send an update, and again if the server has lost it, until it is applied.

    Raises:
        RefusedError: The server refused it.
        UnreachableError: It was not applied before the deadline.
    """
    sequence, again = fields["sequence"], True
    while again:
        asked = {**fields, "wait_s": patience(deadline)}
        reply = connection.push("update", asked, tensors, deadline, register=True)
        again = False
        while reply.get("pending") and not again:
            if time.monotonic() >= deadline:
                raise UnreachableError(f"update {sequence} of '{connection.worker}' gave up waiting for other workers")
            try:
                reply = wait(connection, deadline, sequence=sequence)
            except RefusedError as error:
                if error.status != 404:
                    raise
                again = True  # the server was restarted meanwhile, and knows only what was applied
    return reply


def subtract(connection: Connection, deltas: Mapping[str, Tensor]) -> Fields:
    """Subtract deltas from the parameters in shared memory, without asking.

    Raises:
        RefusedError: There is no shared memory, or a delta does not fit.
    """

    def change(channel: Channel) -> Fields:
        if not isinstance(channel, MemoryChannel):
            raise RefusedError("a server with lock=False takes updates only through shared memory", 409)
        channel.change(deltas)
        return channel.ask("changed", {"worker": connection.worker, "names": list(deltas)})

    return connection.call(change, register=True)
