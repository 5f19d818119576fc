"""What is not looked at again because it did not change: and that a change is seen."""

import pytest
import torch
from torch import nn

from evenstep.core.errors import ConfigError, RefusedError
from evenstep.server import ParameterServer, connect


@pytest.fixture(params=["http", "tcp", "memory"])
def transport(request):
    return request.param


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def gradients(seed):
    torch.manual_seed(seed)
    return {name: torch.randn_like(value) for name, value in model().named_parameters()}


def test_tensors_that_change_move_or_are_others_are_seen(transport):
    net = model()
    server = ParameterServer(net, torch.optim.SGD(net.parameters(), 1.0), staleness=None, transports=(transport,))
    with server, connect(server.url) as client:
        expected = {name: value.clone() for name, value in client.get_parameters().items()}
        update, out = gradients(0), {name: torch.zeros_like(value) for name, value in expected.items()}
        for n in range(6):
            if n == 2:
                update = gradients(2)  # elsewhere in memory
            if n == 3:
                out = {name: torch.zeros_like(value) for name, value in out.items()}
            if n == 4:
                update = {"1.bias": update["1.bias"]}  # fewer
            if n == 5:
                out["0.weight"].data = torch.zeros(4, 3)  # the same object, with other memory
            update["1.bias"].add_(1)  # where it lay before
            client.update_parameters(update)
            for name, value in update.items():
                expected[name].sub_(value)
            found = client.get_parameters(out=out)
            assert all(found[name] is out[name] and torch.equal(out[name], value) for name, value in expected.items())
        out["0.weight"].data = out["0.weight"].data.view(3, 4)  # the same memory, with another shape
        with pytest.raises(ConfigError, match=r"out\['0.weight'\]"):
            client.get_parameters(out=out)
        wrong = {**gradients(1), "0.weight": torch.zeros(3, 4)}
        with pytest.raises(RefusedError, match=r"'0.weight' came as float32\[3, 4\], expected float32\[4, 3\]"):
            client.update_parameters(wrong)
        assert client.get_parameters(min_version=6).keys() == expected.keys()
