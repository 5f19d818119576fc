"""Replicas: servers with the same parameters, each updated by its own workers, that tell each other what changed.

Each replica has a *shadow*: the values that all others know, or will know when what is under way has arrived. At any
time, what its own workers changed is therefore values minus shadow.

- To tell: take that difference, add it to the shadow, and send it to every other replica, numbered so that it counts
  once however often it is sent.
- When told: change values and shadow alike. What its own workers have done meanwhile is still the difference.

So nothing under way in either direction can be overwritten, and when everything is told all replicas hold the sum of
all updates (in floating point up to rounding; rounding errors go with the next difference).
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evenstep.core.errors import EvenstepError
from evenstep.server.client.addresses import connect_whole
from evenstep.server.client.client import Client
from evenstep.server.store.store import Store

__all__ = ["Changes", "Replica"]

log = logging.getLogger("evenstep.server")
_LOOK_S = 0.05  # how often to look for changes that bypass the store (without a lock)
_LONGEST_S = 1.0


class Changes:
    """What one replica has to tell the others. Uses no lock and no network.

    Args:
        values: The parameters themselves, as they are now.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._shadow = {name: value.detach().clone() for name, value in values.items()}

    def take(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the replica's own workers have changed since the last call: to be added elsewhere."""
        found = {}
        for name, shadow in self._shadow.items():
            change = values[name].detach() - shadow
            if bool(change.any()):
                shadow.add_(change)
                found[name] = change
        return found

    def absorb(self, changes: Mapping[str, Tensor]) -> None:
        """Note that another replica's changes were added to the values, so they are not told again."""
        for name, change in changes.items():
            self._shadow[name].add_(change)


class Replica:
    """Keeps a store in step with others, in a thread of its own.

    Args:
        store: The store, to which nothing was put yet.
        name: The name by which the others know this one.
        peers: The addresses of all others.
        token: Their token.
        timeout_s: How long to try to reach one.
    """

    def __init__(
        self, store: Store, name: str, peers: Sequence[str], token: str | None = None, timeout_s: float = 60.0
    ) -> None:
        self._store, self._name, self._urls = store, name, peers
        self._token, self._timeout_s = token, timeout_s
        self._changes: Changes | None = None
        self._over = False
        self._idle = False  # whether everybody has everything that the last look found
        store.commits.after_put = self._begin
        store.state.on_peer = self._absorb
        store.flush = self.flush
        self._thread = threading.Thread(target=self._run, name="evenstep-replica", daemon=True)
        self._thread.start()

    def _trained(self) -> dict[str, Tensor]:
        return {
            name: tensor
            for name, tensor in self._store.tensors().items()
            if name not in self._store.state.buffers and tensor.dtype.is_floating_point
        }

    def _begin(self) -> None:
        self._changes = Changes(self._trained())

    def _absorb(self, deltas: Mapping[str, Tensor]) -> None:
        assert self._changes is not None, "deltas come only for parameters that were put"
        with torch.no_grad():
            self._changes.absorb({name: -delta for name, delta in deltas.items()})

    def _take(self) -> dict[str, Tensor]:
        """The next changes to tell; waits for some. Empty only at the end."""
        store, changed = self._store, self._store.exclusively()
        seen = -1
        with changed, torch.no_grad():
            while not self._over:
                if self._changes is not None and (store.version != seen or not store.options.lock):
                    seen = store.version
                    if found := self._changes.take(self._trained()):
                        self._idle = False
                        return found
                if not self._idle:
                    self._idle = True
                    changed.notify_all()  # wakes those that wait for that in flush
                changed.wait(_LONGEST_S if store.options.lock else _LOOK_S)
        return {}

    def _run(self) -> None:
        clients: list[Client] = []
        try:
            while changes := self._take():
                if not clients:
                    clients = [
                        connect_whole(url, worker=self._name, token=self._token, timeout_s=self._timeout_s)
                        for url in self._urls
                    ]
                for client in clients:
                    client.update_parameters({name: -change for name, change in changes.items()}, kind="peer")
        except EvenstepError as error:
            self._store.attendance.fail(f"another server cannot be told of updates: {error}")
        finally:
            for client in clients:
                client.close()

    def flush(self, wait_s: float) -> bool:
        """Wait until all others have all changes so far; False if they do not in time."""
        changed, deadline = self._store.exclusively(), time.monotonic() + wait_s
        with changed:
            self._idle = False
            changed.notify_all()
            while not self._idle and (left := deadline - time.monotonic()) > 0:
                changed.wait(left)
            return self._idle

    def close(self) -> None:
        """End at once; changes that were not told yet are lost, so flush first."""
        changed = self._store.exclusively()
        with changed:
            self._over = True
            changed.notify_all()
        self._thread.join()
