"""The servers of a run as one worker of a group sees them: which bundle is where, and how to reach it.

The first server of the first server group is also where groups wait for each other (the *hub*).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from evenstep.core.errors import MismatchError
from evenstep.plan.groups import Standing
from evenstep.run.names import PREFIX, bare, bare_names, full
from evenstep.server.client.addresses import connect_whole
from evenstep.server.client.groups import flush, meet, optimizer_state, put
from evenstep.server.client.whole import WholeClient
from evenstep.server.wire.recipes import Recipe

__all__ = ["Servers"]


class Servers:
    """Knows where every bundle is, and the connections to the servers.

    Args:
        standing: The position of the group among others.
        bundles: The names of each bundle's parameters.
        server_of: Which server of a group has each bundle.
        buffers: The names of all buffers; the first server of a group has them.
        timeout_s: How long any wait may take.
        look: Called from time to time while waiting for other groups; raises if waiting has become pointless.
    """

    def __init__(
        self,
        standing: Standing,
        bundles: Sequence[Sequence[str]],
        server_of: Sequence[int],
        buffers: list[str],
        timeout_s: float,
        look: Callable[[], None],
    ) -> None:
        self._standing, self._bundles, self._server_of, self._buffers = standing, bundles, server_of, buffers
        self._timeout_s, self._look = timeout_s, look
        self._lock = threading.Lock()
        self._clients: dict[int, WholeClient] = {}
        self._hub: WholeClient | None = None

    # ---- one bundle at a time: the courier ----

    def send(
        self, bundle: int, version: int, update: Mapping[str, Tensor], options: list[dict[str, Any]] | None
    ) -> None:
        """Send the update of a bundle: a gradient with the optimizer's options, or else a change to subtract."""
        tensors = bare(update)
        if options is None:
            self._client(bundle).update_parameters(tensors, kind="delta", timeout_s=self._timeout_s)
        else:
            self._client(bundle).update(tensors, sequence=version + 1, options=options, timeout_s=self._timeout_s)

    def fetch(self, bundle: int) -> dict[str, Tensor]:
        """The values of a bundle as its server has them now."""
        names = bare_names(self._bundles[bundle])
        return full(self._client(bundle).get_parameters(names, timeout_s=self._timeout_s))

    def _client(self, bundle: int) -> WholeClient:
        with self._lock:
            if bundle not in self._clients:
                server = self._standing.servers[self._standing.server_group][self._server_of[bundle]]
                name = f"group {self._standing.group}, bundle {bundle}"
                self._clients[bundle] = self._connect(server["memory"], name)
            return self._clients[bundle]

    def close(self) -> None:
        """End the connections of the courier."""
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients = {}

    # ---- everything at once: the first worker of a group, between steps ----

    def _names(self, server: int) -> list[str]:
        held = [
            name for bundle, names in enumerate(self._bundles) for name in names if self._server_of[bundle] == server
        ]
        return held + (self._buffers if server == 0 else [])

    def _reader(self, group: int, server: int) -> WholeClient:
        url = self._standing.servers[group][server]["tcp"]
        return self._connect(url, f"group {self._standing.group}", register=False)

    def _connect(self, url: str, name: str, *, register: bool = True) -> WholeClient:
        return connect_whole(url, worker=name, token=self._standing.token, timeout_s=self._timeout_s, register=register)

    def put(self, state: Mapping[str, Tensor], recipe: Recipe | None) -> None:
        """Give every server of every server group its bundles, unless it already has them."""
        if recipe is not None:
            groups = [{**group, "names": bare_names(group["names"])} for group in recipe["groups"]]
            recipe = {**recipe, "groups": groups}
        buffers = bare_names(self._buffers)
        for group, servers in enumerate(self._standing.servers):
            for server in range(len(servers)):
                with self._reader(group, server) as client:
                    if client.status()["owner"] is None:
                        held = bare({name: state[name] for name in self._names(server)})
                        put(client, held, buffers=buffers if server == 0 else (), optimizer=recipe)

    def everything(self, group: int) -> dict[str, Tensor]:
        """What a server group has."""
        found: dict[str, Tensor] = {}
        for server in range(len(self._standing.servers[group])):
            with self._reader(group, server) as client:
                found |= full(client.get_parameters())
        return found

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What the optimizers of the first server group keep, by the run's names."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for server in range(len(self._standing.servers[0])):
            with self._reader(0, server) as client:
                found = optimizer_state(client)
            tensors |= {_state_name(name): tensor for name, tensor in found[0].items()}
            values |= {_state_name(name): value for name, value in found[1].items()}
        return tensors, values

    def put_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give the first server of the first group new values of buffers."""
        if buffers:
            named = bare(buffers)
            url = self._standing.servers[0][0]["tcp"]
            with self._connect(url, f"group {self._standing.group}, buffers") as client:
                client.update_parameters(named, kind="peer", buffers=list(named))  # by the server, lock or not

    def flush(self) -> None:
        """Make the servers of this group tell all others their updates."""
        if len(self._standing.servers) > 1:
            for server in range(len(self._standing.servers[self._standing.server_group])):
                with self._reader(self._standing.server_group, server) as client:
                    flush(client, self._timeout_s)

    def meet(self, tag: str, value: Any = None) -> dict[str, Any]:
        """Wait for all groups; return the value of each."""
        if self._hub is None:
            self._hub = self._reader(0, 0)
        return meet(self._hub, tag, value, self._standing.groups, self._timeout_s, self._look)

    def compare_models(self, state: Mapping[str, Tensor]) -> None:
        """Wait for all groups, and check that they have the same model.

        Raises:
            MismatchError: They do not.
        """
        mine = [[name, f"{tuple(t.shape)} {t.dtype}"] for name, t in state.items() if name.startswith(PREFIX)]
        for group, theirs in self.meet("all have joined", mine).items():
            for here, there in zip([*mine, None], [*theirs, None], strict=False):
                if here != there:
                    raise MismatchError(
                        f"{group} prepares {there or 'nothing more'} where group {self._standing.group} prepares "
                        f"{here or 'nothing more'}: all groups must build the same model"
                    )

    def leave(self) -> None:
        """End the connection to the hub."""
        if self._hub is not None:
            self._hub.close()
            self._hub = None


def _state_name(name: str) -> str:
    """optimizer.NAME.KEY -> optimizer.model.NAME.KEY."""
    return f"optimizer.{PREFIX}{name.removeprefix('optimizer.')}"
