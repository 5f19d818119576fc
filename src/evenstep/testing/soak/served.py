"""A durable server that is killed again and again while clients send updates: each must count exactly once.

As a script: the clients.
"""

import argparse
import json
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from evenstep.server import connect
from evenstep.testing.soak.burden import SoakResult, end, start

__all__ = ["Served", "build", "main"]

_SIZE = 4096
_CLIENTS = 3
_PATIENCE_S = 120.0


def build() -> nn.Module:
    """The model that is served: zeros, so that every sum of ones is exact."""
    model = nn.Linear(_SIZE, 4, bias=False)
    nn.init.zeros_(model.weight)
    return model


class Served:
    """See `Burden`.

    Args:
        directory: An empty one.
        seconds: How long it will go on.
        seed: Seeds the kills.
    """

    name = "server"

    def __init__(self, directory: Path, seconds: float, seed: int) -> None:
        self._directory, self._dice = directory, random.Random(seed)
        self._life_s = min(max(seconds / 20, 6.0), 60.0)
        self._kill_at = 0.0
        self._kills = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._clients: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """See `Burden`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._start()
        self._clients = start(["-m", __spec__.name, self._url], self._directory / "clients.log")

    @property
    def _url(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def _start(self) -> None:
        command = ["-m", "evenstep", "server", f"{__file__}:build", "--durable", "--directory"]
        command += [str(self._directory / "state"), "--port", str(self._port), "--transports", "tcp"]
        command += ["--staleness", "none", "--snapshot-every", "500"]
        self._server = start(command, self._directory / "server.log")
        self._kill_at = time.monotonic() + self._life_s * self._dice.uniform(0.2, 1.8)

    def turn(self) -> None:
        """See `Burden`."""
        assert self._server is not None, "a burden is begun before it is used"
        if self._server.poll() is None and time.monotonic() > self._kill_at:
            self._server.kill()
            self._server.wait()
            self._kills += 1
            self._start()

    def subjects(self) -> Mapping[str, Sequence[int]]:
        """See `Burden`."""
        assert self._server is not None, "a burden is begun before it is used"
        assert self._clients is not None, "a burden is begun before it is used"
        return {"server": [self._server.pid], "server: clients": [self._clients.pid]}

    def finish(self) -> SoakResult:
        """See `Burden`."""
        assert self._server is not None, "a burden is begun before it is used"
        assert self._clients is not None, "a burden is begun before it is used"
        code = end(self._clients, patience_s=_PATIENCE_S)
        lines = (self._directory / "clients.log").read_text(errors="replace").splitlines()
        details = "\n".join([*lines, (self._directory / "server.log").read_text(errors="replace")[-20000:]])
        try:
            done, version, low, high = json.loads(lines[-1])
        except (ValueError, IndexError):
            done, version, low, high = -1, 0, 0.0, 0.0
        ended = end(self._server)
        good = code == 0 and ended == 0 and version == done and low == high == float(done)
        did = f"{done} updates of {_CLIENTS} clients, {self._kills} servers killed"
        result = "each counts once" if good else f"version {version}, values {low:g} to {high:g}, exits {code} {ended}"
        return SoakResult(good, did, result, details)


def main() -> None:
    """Run until SIGTERM as the clients of a server; then print [updates done, version, lowest value, highest value]."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    url = parser.parse_args().url
    over, done = threading.Event(), [0] * _CLIENTS
    signal.signal(signal.SIGTERM, lambda *_: over.set())

    def work(number: int) -> None:
        with connect(url, worker=f"client {number}", timeout_s=_PATIENCE_S) as client:
            while not over.is_set():
                client.update_parameters({"weight": torch.full((4, _SIZE), -1.0)}, kind="delta")
                done[number] += 1
                if done[number] % 50 == 0:
                    client.get_parameters()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # a signal is only seen between waits
            thread.join(0.2)
    with connect(url, register=False, timeout_s=_PATIENCE_S) as client:
        weight = client.get_parameters()["weight"]
        print(json.dumps([sum(done), client.version, float(weight.min()), float(weight.max())]), flush=True)


if __name__ == "__main__":
    main()
