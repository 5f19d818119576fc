"""Without a lock: clients change the parameters in shared memory by themselves."""

import os

import pytest
import torch
from torch import nn

from evenstep.core.errors import RefusedError
from evenstep.server import ParameterServer, connect


def test_deltas_are_subtracted_in_place_and_counted():
    net = nn.Linear(3, 2)
    with ParameterServer(net, staleness=None, lock=False) as server, connect(server.urls["memory"]) as client:
        before = client.get_parameters()
        assert client.update_parameters({"bias": torch.ones(2)}, kind="delta") == 1
        assert torch.equal(net.bias.detach(), before["bias"] - 1), "the server's own memory"
        assert torch.equal(client.get_parameters()["bias"], before["bias"] - 1)
        assert list(client.get_parameters(since=0)) == ["bias"]
        with pytest.raises(RefusedError, match="'bias' came as"):
            client.update_parameters({"bias": torch.ones(3)}, kind="delta")
        with (
            connect(server.urls["tcp"]) as other,
            pytest.raises(RefusedError, match="takes updates only through shared memory"),
        ):
            other.update_parameters({"bias": torch.ones(2)}, kind="delta")


def test_processes_change_different_parts_at_once_and_every_update_counts():
    net = nn.ParameterList([nn.Parameter(torch.zeros(1000)) for _ in range(3)])
    with ParameterServer(net, staleness=None, lock=False, transports=("memory",)) as server:
        pids = []
        for n in range(3):
            pid = os.fork()
            if pid == 0:
                try:
                    with connect(server.url) as client:
                        for _ in range(50):
                            client.update_parameters({str(n): torch.full((1000,), -1.0)}, kind="delta")
                finally:
                    os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        assert server.store.version == 150
        assert all(bool((p == 50).all()) for p in net), "who shares no parameter loses nothing"
