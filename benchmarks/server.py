"""The parameter server against a bare TCP socket that moves the same bytes, in one run, as ratios.

python benchmarks/server.py
"""

import argparse
import json
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from evenstep.native import core
from evenstep.server import ParameterServer, connect
from results import Record, add_option

LARGE, SMALL = 25 << 20, 100 << 10
GOALS = {"http": 0.5, "tcp": 0.8, "memory": 2.0}


def model(num_bytes: int) -> nn.ParameterList:
    """So many bytes in four tensors: two layers with their biases."""
    bias = 256
    weight = num_bytes // 8 - bias
    return nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in (weight, bias, weight, bias)])


def forked(body: Callable[[int], None]) -> tuple[int, str]:
    """Run a body in a process of its own; return its id and the first line that it writes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            core.die_with_parent()
            body(writing)
        finally:
            os._exit(0)
    os.close(writing)
    line = os.read(reading, 4096).decode()
    os.close(reading)
    return pid, line


def bare(num_bytes: int) -> Callable[[int], None]:
    """A server that sends this many bytes when asked, takes as many, and answers with one."""

    def serve(writing: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        os.write(writing, str(listener.getsockname()[1]).encode())
        stream, _ = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = memoryview(bytearray(num_bytes))
        while stream.recv(1):
            stream.sendall(data)
            fill(stream, data)
            stream.sendall(b"k")

    return serve


def fill(stream: socket.socket, data: memoryview) -> None:
    """Read as much as fits."""
    while data:
        data = data[stream.recv_into(data) :]


def resident(pid: int, key: str) -> int:
    """A figure of a process's memory, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(key))


def ours(num_bytes: int, *transports: str) -> Callable[[int], None]:
    """A parameter server with a plain SGD; says what its process takes besides the parameters."""

    def serve(writing: int) -> None:
        net = model(num_bytes)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        server = ParameterServer(net, optimizer, staleness=None, transports=transports)
        server.start()
        besides = resident(os.getpid(), "VmRSS") - num_bytes
        os.write(writing, json.dumps([server.urls, besides]).encode())
        signal.pause()

    return serve


def rounds(num_bytes: int, times: int) -> dict[str, list[float]]:
    """Seconds of every pull-and-push round of one client, by transport."""
    echo, port = forked(bare(num_bytes))
    pid, line = forked(ours(num_bytes, *GOALS))
    urls, _ = json.loads(line)
    stream = socket.create_connection(("127.0.0.1", int(port)))
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = memoryview(bytearray(num_bytes))

    def move() -> None:
        stream.sendall(b"p")
        fill(stream, data)
        stream.sendall(data)
        stream.recv(1)

    names = [name for name, _ in model(num_bytes).named_parameters()]
    like = dict(zip(names, model(num_bytes).parameters(), strict=True))
    gradients = {name: torch.ones_like(p) for name, p in like.items()}
    out = {name: torch.empty_like(p) for name, p in like.items()}
    clients = {name: connect(url) for name, url in urls.items()}

    def round_of(name: str) -> Callable[[], None]:
        def pull_and_push() -> None:
            clients[name].get_parameters(out=out)
            clients[name].update_parameters(gradients)

        return pull_and_push

    actions = {"bare": move, **{name: round_of(name) for name in clients}}
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for n in range(times + 3):
        for name, action in actions.items():  # in turns, so that all have the same noise
            begin = time.perf_counter()
            action()
            if n >= 3:
                seconds[name].append(time.perf_counter() - begin)
    for client in clients.values():
        client.close()
    stream.close()
    end(echo, pid)
    return seconds


def end(*pids: int) -> None:
    """End processes of ours."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def together(url: str, num_clients: int, num_bytes: int, times: int) -> float:
    """Rounds a second of several clients at once, each in a process of its own."""
    pids = []
    ready, start = os.pipe(), os.pipe()
    for _ in range(num_clients):
        pid = os.fork()
        if pid == 0:
            net = dict(model(num_bytes).named_parameters())
            gradients = {name: torch.ones_like(p) for name, p in net.items()}
            out = {name: torch.empty_like(p) for name, p in net.items()}
            client = connect(url, timeout_s=120)
            client.get_parameters(out=out)
            os.write(ready[1], b"r")
            os.read(start[0], 1)
            for _ in range(times):
                client.get_parameters(out=out)
                client.update_parameters(gradients)
            client.close()
            os._exit(0)
        pids.append(pid)
    for _ in pids:
        os.read(ready[0], 1)
    begin = time.perf_counter()
    os.write(start[1], b"s" * num_clients)
    for pid in pids:
        os.waitpid(pid, 0)
    for fd in (*ready, *start):
        os.close(fd)
    return num_clients * times / (time.perf_counter() - begin)


def of_the_bare_socket(record: Record, title: str, seconds: dict[str, list[float]], goals: dict[str, float]) -> None:
    """The table of one size: milliseconds of a round, and the bare socket's over them."""
    bare_s, lines = statistics.median(seconds["bare"]), []
    for name, times in seconds.items():
        median_s, late_s = statistics.median(times), statistics.quantiles(times, n=100, method="inclusive")[98]
        share, goal = bare_s / median_s, goals.get(name)
        reached = "-" if goal is None else "yes" if share >= goal else "no"
        cells = [f"{1e3 * median_s:.2f}", f"{1e3 * late_s:.2f}", f"{1 / median_s:.0f}", f"{share:.2f}"]
        lines.append([name, *cells, str(goal or "-"), reached])
    columns = ["transport", "ms", "99 of 100 within ms", "rounds a second", "of the bare socket", "goal", "reached"]
    chart = {"means": "of the bare socket's speed", "goal": "goal"}
    record.table(columns, lines, title, values=columns[4:5], labels=columns[:1], **chart)


def main() -> None:
    """Print ratios, and what they should be."""
    parser = argparse.ArgumentParser(description="Measure the parameter server against a bare socket.")
    add_option(parser)
    options = parser.parse_args()
    record = Record.begin()
    torch.set_num_threads(1)  # we fork: a pool of threads would not survive it
    of_the_bare_socket(record, "Pull and push of 25 MiB, one client", rounds(LARGE, 15), GOALS)
    pid, line = forked(ours(LARGE, "tcp"))
    urls, besides = json.loads(line)
    one = together(urls["tcp"], 1, LARGE, 16)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # begin to look for the highest
    eight = together(urls["tcp"], 8, LARGE, 4)
    copies = (resident(pid, "VmHWM") - besides) / LARGE
    end(pid)
    of_the_bare_socket(record, "Pull and push of 100 KB, one client", rounds(SMALL, 500), {"tcp": 0.4})
    record.note(f"Eight clients at once have {eight / one:.2f} of one client's throughput (goal: 1).")
    record.note(f"The server's memory at its highest: {copies:.2f} copies of the parameters (goal: 3).")
    record.save(options.json)
    assert threading.active_count() == 1, "nothing is left"


if __name__ == "__main__":
    main()
