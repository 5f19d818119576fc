"""`connect`: from an address to a client, whether one server is there or several."""

from collections.abc import Sequence
from typing import Any

from evenstep.core.errors import ConfigError
from evenstep.server import client as one
from evenstep.server.client import Client
from evenstep.server.compress import Compressor
from evenstep.server.several import SeveralClient

__all__ = ["connect"]


def connect(
    url: str | Sequence[str],
    *,
    worker: str | None = None,
    token: str | None = None,
    timeout_s: float = 60.0,
    cafile: str | None = None,
    bfloat16: bool = False,
    top_k: float | None = None,
    register: bool = True,
) -> Client:
    """Connect to a parameter server, or to several that hold slices of one model.

    Args:
        url: `http://host:port`, `https://`, `tcp://host:port`, `tcps://`, or `memory://name` on the server's machine.
            Several in their order, as a list or joined by commas.
        worker: What this worker calls itself; another one with the same name would be taken for it.
        token: What the server printed, if it wants one.
        timeout_s: How long to try when the server cannot be reached, and to wait for other workers.
        cafile: For TLS: whom to trust, if not the system's authorities.
        bfloat16: Send and get parameters in bfloat16, which halves what travels and loses precision.
        top_k: Send only this share of each gradient, the largest, and keep the rest for later.
        register: Be counted among the workers. False for those who only read: nobody waits for them.

    Raises:
        ConfigError: An argument makes no sense, or these are not all servers of one set in order.
        UnreachableError: Nobody is there.
    """
    urls = [part.strip() for part in url.split(",")] if isinstance(url, str) else list(url)
    options: dict[str, Any] = {"token": token, "timeout_s": timeout_s, "cafile": cafile}
    if len(urls) == 1:
        client = one.connect(urls[0], worker=worker, bfloat16=bfloat16, top_k=top_k, register=register, **options)
        place = client.place if register else client._call(lambda channel: channel.ask("slice", {}))["place"]
        if place[1] > 1:
            index, count = place[:2]
            client.close()
            raise ConfigError(f"{urls[0]} is server {index} of {count}; give the addresses of all, joined by commas")
        return client
    compressor = Compressor(bfloat16, top_k)
    clients: list[Client] = []
    try:
        for each in urls:
            name = worker if not clients else clients[0].worker
            clients.append(one.connect(each, worker=name, register=False, **options))
        return SeveralClient(clients, compressor, register=register)
    except BaseException:
        for each_client in clients:
            each_client.close()
        raise
