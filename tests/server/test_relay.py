"""One message for a machine: a relay adds up what its clients send, to the bits that the server would have made."""

import threading

import pytest
import torch
from torch import nn

from evenstep.core.errors import RefusedError, ServerError
from evenstep.plan import tree
from evenstep.plan.placement import cut
from evenstep.server import ParameterServer, Relay, connect

SHARDS, WORKERS, STEPS = 7, 4, 3


def model():
    torch.manual_seed(3)
    return nn.Linear(19, 31)


def shard_gradients(step):
    """What each shard would give; one of them has none for the bias."""
    generator = torch.Generator().manual_seed(step)
    found = [
        {n: torch.randn(p.shape, generator=generator) for n, p in model().named_parameters()} for _ in range(SHARDS)
    ]
    del found[step % SHARDS]["bias"]
    return found


def nodes_of(worker, step):
    """The tree nodes of one worker's shards, as a run sends them."""
    span = cut(SHARDS, WORKERS)[worker]
    spans = tree.cover(span, SHARDS)
    update = {}
    for first, end in spans:
        for name in ("weight", "bias"):
            held = [g[name] for g in shard_gradients(step)[first:end] if name in g]
            program = tree.leaf_program(end - first)
            present = tuple(name in g for g in shard_gradients(step)[first:end])
            if held:
                update[f"{first}-{end}/{name}"] = reduce(held, tree.present_program(program, present))
    return update, [list(span) for span in spans]


def reduce(items, program):
    stack = []
    for item, merges in zip(items, program, strict=True):
        stack.append(item.clone())
        for _ in range(merges):
            right = stack.pop()
            stack.append(stack.pop() + right)
    return stack[0]


def train(urls, kind):
    """Let every worker send its updates, each to its own address."""

    def work(worker):
        with connect(urls[worker], worker=f"w{worker}", timeout_s=20) as client:
            for step in range(STEPS):
                if kind == "nodes":
                    update, spans = nodes_of(worker, step)
                    version = client.update_parameters(update, shards=SHARDS, spans=spans, base=client.version)
                else:
                    update = {n: torch.full_like(p, float(worker)) for n, p in model().named_parameters()}
                    version = client.update_parameters(update, samples=worker + 1)
                found[worker] = client.get_parameters(min_version=version)

    found = {}
    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == WORKERS
    return found


def serve(workers, **options):
    net = model()
    return ParameterServer(
        net, torch.optim.Adam(net.parameters(), 0.01), workers=workers, transports=("tcp",), **options
    )


@pytest.mark.parametrize("kind", ["nodes", "means"])
@pytest.mark.parametrize("servers", [1, 2])
def test_relays_change_no_bit_and_send_one_message_for_each_machine(kind, servers):
    with serve(WORKERS) as server:
        direct = train([server.url] * WORKERS, kind)
        assert server._host._service.counts["update"] == WORKERS * STEPS
    with (
        serve(2, servers=servers) as server,
        Relay(server.url, 2, worker="left") as left,
        Relay(server.url, 2, worker="right") as right,
    ):
        found = train([left.url, left.url, right.url, right.url], kind)
        with connect(server.url, register=False) as client:
            status, there = client.status(), client.get_parameters()
        assert (status["version"], status["requests"]["update"]) == (STEPS, 2 * STEPS)
    for worker in range(WORKERS):
        for name, value in there.items():
            assert torch.equal(found[worker][name], value)
            if kind == "nodes":
                assert torch.equal(direct[worker][name], value)
            else:
                assert torch.allclose(direct[worker][name], value, atol=1e-6)


def test_what_the_server_refuses_the_clients_of_the_relay_hear():
    net = model()
    with ParameterServer(net, transports=("tcp",), reject_nonfinite=True, staleness=None) as server:
        with Relay(server.url, 1) as relay, connect(relay.url) as client:
            with pytest.raises(RefusedError, match="this server has no optimizer"):
                client.update_parameters({"bias": torch.zeros(31)})
            assert client.update_parameters({"bias": torch.ones(31)}, kind="delta") == 1
            with pytest.raises(ServerError, match="the server behind it did not take the update: the update of 'bias'"):
                client.update_parameters({"bias": torch.full((31,), torch.inf)}, kind="delta")
        assert server.store.version == 1
