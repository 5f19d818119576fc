"""Clients that die while others wait for them: nobody waits for longer than a lease, and no update is lost or mixed."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import processes
from evenstep.core.errors import UnreachableError
from evenstep.native import core
from evenstep.server import ParameterServer, connect
from evenstep.server.hosting.config import TRANSPORTS

LEASE_S = 0.5


def ones(amount=1.0):
    return {"bias": torch.full((3,), float(amount))}


@contextmanager
def serving(transport, **options):
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.bias)
    with ParameterServer(model, transports=(transport,), lease_s=LEASE_S, **options) as server:
        yield server


def client_that(url, does):
    """A client in a process of its own; returns its id when it has begun."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            core.die_with_parent()
            client = connect(url, worker="mortal", timeout_s=60)
            os.write(writing, b"begun")
            does(client)
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 10) == b"begun"
    os.close(reading)
    return pid


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def bias_of(server):
    return server.store.tensors()["bias"][0].item()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_that_dies_before_its_turn_is_waited_for_no_longer_than_its_lease(transport):
    with serving(transport) as server:
        started = time.monotonic()
        pid = client_that(server.url, lambda client: signal.pause())
        with connect(server.url, worker="here") as client:
            kill(pid)
            assert client.update_parameters(ones(), kind="delta") == 1
            assert LEASE_S < time.monotonic() - started < 20
            assert client.update_parameters(ones(), kind="delta") == 2
            assert "worker 'mortal' was dropped" in str(client.status()["events"])
        assert bias_of(server) == -2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_one_has_contributed_counts_although_it_dies_while_it_waits(transport):
    with serving(transport, workers=2) as server:
        pid = client_that(server.url, lambda client: client.update_parameters(ones(2), kind="delta"))
        assert processes.until(lambda: any(w["in_this_update"] for w in server.store.status()["workers"]))
        kill(pid)
        time.sleep(2 * LEASE_S)
        with connect(server.url, worker="here") as client:
            assert client.update_parameters(ones(4), kind="delta") == 1
        assert bias_of(server) == -3, "the mean of both"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_new_life_takes_back_what_the_last_has_contributed(transport):
    with serving(transport, workers=2) as server:
        pid = client_that(server.url, lambda client: client.update_parameters(ones(2), kind="delta"))
        assert processes.until(lambda: any(w["in_this_update"] for w in server.store.status()["workers"]))
        kill(pid)
        with connect(server.url, worker="mortal") as again, connect(server.url, worker="here") as client:
            threads = [
                threading.Thread(target=again.update_parameters, args=(ones(6),), kwargs={"kind": "delta"}),
                threading.Thread(target=client.update_parameters, args=(ones(4),), kwargs={"kind": "delta"}),
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert (server.store.version, bias_of(server)) == (1, -5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_slowest_that_dies_holds_nobody_back_for_longer_than_its_lease(transport):
    with serving(transport, staleness=1) as server:
        pid = client_that(server.url, lambda client: signal.pause())
        with connect(server.url, worker="fast") as client:
            assert client.update_parameters(ones(), kind="delta") == 1
            kill(pid)
            assert client.update_parameters(ones(), kind="delta") == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_that_is_stopped_is_dropped_and_registers_anew(transport):
    def train(client):
        while True:
            client.update_parameters(ones(), kind="delta")
            time.sleep(0.01)

    with serving(transport, staleness=None) as server:
        pid = client_that(server.url, train)
        assert processes.until(lambda: server.store.version > 2)
        os.kill(pid, signal.SIGSTOP)
        assert processes.until(lambda: not server.store.status()["workers"])
        version = server.store.version
        os.kill(pid, signal.SIGCONT)
        assert processes.until(lambda: server.store.version > version + 2)
        kill(pid)


def test_where_there_must_be_more_workers_than_are_left_that_is_said():
    with serving("tcp", workers=2) as server:
        pid = client_that(server.url, lambda client: signal.pause())
        kill(pid)
        with (
            connect(server.url, worker="here") as client,
            pytest.raises(UnreachableError, match="update 1 of 'here' gave up waiting for other workers"),
        ):
            client.update_parameters(ones(), kind="delta", timeout_s=2 * LEASE_S)


def test_many_that_die_at_any_moment_leave_a_server_that_goes_on():
    with serving("tcp", staleness=0) as server:

        def train(client):
            while True:
                client.update_parameters(ones(0.0), kind="delta")

        for n in range(6):
            pid = client_that(server.url, train)
            time.sleep(0.01 * n)
            kill(pid)
        with connect(server.url, worker="last") as client:
            version = client.update_parameters(ones(), kind="delta")
            assert json.loads(json.dumps(client.status()))["broken"] is None
        assert server.store.version == version
