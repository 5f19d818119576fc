"""What groups of workers ask of a server besides parameters: to take an optimizer, to let them meet, to tell others.

Each of these talks to one server, through its client.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from evenstep.core.errors import UnreachableError
from evenstep.server.client.channels import Fields
from evenstep.server.client.whole import WholeClient
from evenstep.server.wire.recipes import Recipe

__all__ = ["flush", "meet", "optimizer_state", "put"]

_LOOK_S = 0.5  # how long the server holds a request that has to wait
_LONGEST_S = 5.0


def put(
    client: WholeClient,
    parameters: Mapping[str, Tensor],
    *,
    buffers: Iterable[str] = (),
    optimizer: Recipe | None = None,
) -> None:
    """Give the parameters their values, and the optimizer that updates them.

    Args:
        client: The client of the server.
        parameters: All of them.
        buffers: Which of them the optimizer does not train.
        optimizer: As `recipes.describe` says it; None: only deltas will come.

    Raises:
        RefusedError: They have values already, or the server has an optimizer.
    """
    tensors = {name: value.detach().cpu().contiguous() for name, value in parameters.items()}
    fields: Fields = {"worker": client.worker, "buffers": list(buffers), "optimizer": optimizer}
    client.connection.push("put", fields, tensors)


def optimizer_state(client: WholeClient) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of the server's optimizer: tensors, and plain values, as `optimizer.PARAMETER.KEY`.

    Raises:
        RefusedError: The client uses shared memory, which does not hold it.
    """
    reply, tensors = client.connection.pull({"optimizer": True}, None)
    return tensors, reply["values"]


def meet(
    client: WholeClient, tag: str, value: Any, count: int, timeout_s: float, look: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Leave a value, wait until all clients have come to this meeting, and return what each left.

    Args:
        client: The client of the server where it is; it comes under the name of its worker.
        tag: The name of the meeting.
        value: What to leave, as JSON; of one that comes twice, the first counts.
        count: How many have to come.
        timeout_s: How long to wait.
        look: Called from time to time; may raise.

    Raises:
        UnreachableError: Some did not come in time, or the server is gone.
    """
    fields: Fields = {"worker": client.worker, "tag": tag, "value": value, "count": count, "wait_s": _LOOK_S}
    deadline = time.monotonic() + timeout_s
    while True:
        look()
        reply = client.connection.ask("meet", fields, deadline)
        if not reply.get("pending"):
            found: dict[str, Any] = reply["found"]
            return found
        if time.monotonic() >= deadline:
            raise UnreachableError(f"'{tag}': only {', '.join(reply['here'])} of {count} came in time")


def flush(client: WholeClient, timeout_s: float) -> None:
    """Wait until the server has told all others like it of what it was told so far.

    Raises:
        UnreachableError: It did not do so in time.
    """
    deadline = time.monotonic() + timeout_s
    while client.connection.ask("flush", {"wait_s": _LONGEST_S}, deadline)["pending"]:
        if time.monotonic() >= deadline:
            raise UnreachableError(f"the server {client.url} could not tell the others of all updates in time")
