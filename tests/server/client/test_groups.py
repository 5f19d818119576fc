"""What groups of workers ask of a server: the state of its optimizer, and to meet there."""

import threading

import pytest
import torch
from torch import nn

from evenstep.core.errors import RefusedError, UnreachableError
from evenstep.server import ParameterServer, connect
from evenstep.server.client.groups import meet, optimizer_state, put
from evenstep.server.wire.recipes import describe


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def named(model):
    return {id(p): name for name, p in model.named_parameters()}


def test_the_state_of_an_optimizer_can_be_fetched():
    model = net()
    recipe = describe(torch.optim.Adam(model.parameters(), 0.5), named(model))
    with ParameterServer(staleness=None, transports=("tcp", "memory")) as server, connect(server.url) as client:
        put(client, dict(model.named_parameters()), optimizer=recipe)
        client.update({"1.bias": torch.ones(2)})
        tensors, values = optimizer_state(client)
        assert sorted(tensors) == [f"optimizer.1.bias.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
        assert tensors["optimizer.1.bias.exp_avg"].tolist() == pytest.approx([0.1, 0.1])
        assert values == {}
        with connect(server.urls["memory"]) as near, pytest.raises(RefusedError, match="ask for it over tcp"):
            optimizer_state(near)


def test_who_comes_to_a_meeting_waits_for_all_and_hears_what_each_said_first():
    with ParameterServer(nn.Linear(1, 1), transports=("tcp",)) as server:
        found = {}

        def come(n):
            with connect(server.url, worker=f"g{n}", register=False) as client:
                found[n] = meet(client, "here", {"said": n}, 3, 60.0)

        threads = [threading.Thread(target=come, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(each == {f"g{n}": {"said": n} for n in range(3)} for each in found.values())
        with connect(server.url, worker="g1", register=False) as client:
            assert meet(client, "here", "something else", 3, 20.0)["g1"] == {"said": 1}
            with pytest.raises(UnreachableError, match="'elsewhere': only g1 of 2 came in time"):
                meet(client, "elsewhere", None, 2, 0.1)
        with (
            connect(server.url, worker="g9", register=False) as client,
            pytest.raises(RefusedError, match="where all 3 are already"),
        ):
            meet(client, "here", None, 3, 20.0)
