"""Every field of every request, given what it is not: a sentence and a 4xx, and the next good request works."""

import contextlib
import http.client
import itertools
import json
import socket
import struct
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

import pytest
import torch
from torch import nn

from evenstep.server import Limits, ParameterServer
from evenstep.server.hosting.config import ServerConfig
from evenstep.server.hosting.host import Host
from evenstep.server.service.requests import VERBS
from evenstep.server.wire.slices import ServerPlace
from evenstep.server.wire.tensors import encode

ANYTHING = [
    "true", "0", "1", "-1", "-7", "1.5", "1e308", "1e999", "-1e999", "NaN", "Infinity", str(10**30), str(10**400),
    '""', '"x"', '"' + 300 * "a" + '"', r'"\ud800"', r'"\u0000"', "[]", "[[]]", "[1]", "[null]", "[[1]]", "[[[],{}]]",
    '["x"]', r'["\ud800"]', "{}", '{"a":1}', '{"a":1,"a":2}', "[[1,2]]", "[[0,1]]", '[{"lr":"x"}]', "[{}]",
    200 * "[" + 200 * "]", 900 * '{"a":' + "1" + 900 * "}", "nonsense",
]  # fmt: skip

WHOLE, NAMES, SECONDS, FLAG = {"0", "1", "true"}, {"[]", '["x"]'}, {"0", "1", "1.5"}, {"true", "0", "1"}
JSON = {text for text in ANYTHING if text not in ("1e999", "-1e999", "NaN", "Infinity", "nonsense", '{"a":1,"a":2}')}
NOTE = {text for text in JSON if r"\ud800" not in text and "[[[[[" not in text and text.count("{") < 900}
TEXT = {'"x"'}
RIGHT = {
    "worker": TEXT, "tag": TEXT, "session": {'""', '"x"', r'"\u0000"'}, "kind": set(),
    "force": FLAG, "bfloat16": FLAG, "versions": FLAG, "place_only": FLAG, "layout": FLAG, "on": FLAG,
    "names": NAMES, "buffers": NAMES, "alive": NAMES,
    "sequence": WHOLE, "min_version": WHOLE, "samples": WHOLE, "base": WHOLE, "shards": WHOLE, "staged": WHOLE,
    "count": WHOLE, "since": WHOLE | {"-1"}, "wait_s": SECONDS,
    "note": NOTE, "value": NOTE, "spans": {"[]", "[[0,1]]"}, "options": {"[]", "[{}]"}, "order": {"[]"},
    "optimizer": FLAG,
}  # fmt: skip
"""For every field what it may be; not that it must be taken: that depends on the rest."""


def test_every_field_is_tried():
    assert {name for request in VERBS.values() for name in request._fields} == RIGHT.keys()


@dataclass
class Servers:
    """One that is alone, one that follows another, and one without a lock."""

    alone: ParameterServer
    follower: Host
    free: ParameterServer


@pytest.fixture
def servers():
    net = nn.Linear(4, 3)
    limits = Limits(wait_s=0.01)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    with (
        ParameterServer(net, optimizer, staleness=None, limits=limits, transports=("http", "tcp")) as alone,
        ParameterServer(nn.Linear(4, 3), staleness=None, lock=False, limits=limits, transports=("tcp",)) as free,
    ):
        config = ServerConfig(transports=("http", "tcp"), staleness=None, limits=limits)
        follower = Host(config, None, (nn.Linear(4, 3), None), ServerPlace(1, 2, "set"))
        follower.start()
        try:
            yield Servers(alone, follower, free)
        finally:
            follower.close()


class Frames:
    """A client that writes frames by itself."""

    def __init__(self, url):
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._stream = None

    def ask(self, verb, fields, body=b""):
        """Send fields, as JSON texts; return the status and the error."""
        text = "{" + ",".join(f'"{name}":{value}' for name, value in {"verb": f'"{verb}"', **fields}.items()) + "}"
        if self._stream is None:
            self._stream = socket.create_connection(self._address, timeout=20)
        self._stream.sendall(struct.pack("<4sIQ", b"EVST", len(text.encode()), len(body)) + text.encode() + body)
        _, fields_bytes, body_bytes = struct.unpack("<4sIQ", self._take(16))
        reply = json.loads(self._take(fields_bytes))
        self._take(body_bytes)
        if "is not JSON" in reply.get("error", ""):  # this ends the connection
            assert self._stream.recv(1) == b""
            self.close()
        return reply["status"], reply.get("error")

    def _take(self, num_bytes):
        data = b""
        while len(data) < num_bytes:
            piece = self._stream.recv(num_bytes - len(data))
            assert piece, "an answer, and no silence"
            data += piece
        return data

    def close(self):
        self._stream.close()
        self._stream = None


ROUTES = {
    "put": ("PUT", "/parameters"), "get": ("GET", "/parameters"), "wait": ("GET", "/wait"),
    "status": ("GET", "/status"), "slice": ("GET", "/slice"),
}  # fmt: skip


class Http:
    """A client that writes HTTP by itself."""

    def __init__(self, url):
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)

    def ask(self, verb, fields, body=b""):
        method, path = ROUTES.get(verb, ("POST", f"/{verb}"))
        headers = {"content-type": "application/octet-stream"} if body else {}
        address = f"{path}?{urlencode(fields)}"
        self._connection.request(method, address, body or None, headers)
        response = self._connection.getresponse()
        text = response.read()
        return response.status, json.loads(text).get("error") if response.status >= 300 else None

    def close(self):
        self._connection.close()


UPDATE = b"".join(encode({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}))
NUMBERS = itertools.count(1)


def good(verb, servers, transport):
    """A server, and a request that it takes: fields as JSON, and a body."""
    fields, body, server = {}, b"", servers.alone
    if "worker" in VERBS[verb]._fields:
        fields["worker"] = '"w"'
    if verb in ("update", "put"):
        body = UPDATE
        fields |= {"sequence": str(next(NUMBERS))} if verb == "update" else {"force": "true"}
    elif verb == "stage":
        follower = servers.follower.store
        body = b"".join(encode({name: torch.zeros_like(value) for name, value in follower.tensors().items()}))
        fields |= {"sequence": str(next(NUMBERS)), "kind": '"delta"'}
        server = servers.follower
    elif verb == "changed":
        server = servers.free
    elif verb == "meet":
        fields["tag"] = f'"meeting {next(NUMBERS)}"'
    if verb == "leave":
        fields["worker"] = '"gone"'
    if transport == "http":
        fields = {name: json.loads(text) if text.startswith('"') else text for name, text in fields.items()}
    return server, fields, body


TEXTS = {"worker", "session", "kind", "tag"}
WRONG_TEXTS = {"worker": ["", "a" * 300, "\x00", "a\nb"], "session": ["a" * 65], "kind": ["", "wish", "Gradient"]}


def wrong_values(field, transport):
    if transport == "http" and field in TEXTS:
        return WRONG_TEXTS[field]
    return [text for text in ANYTHING if text not in RIGHT[field]]


def over_http(verb):
    return [name for name in VERBS[verb]._fields if name not in ("optimizer", "place_only")]


CASES = [("tcp", verb, list(VERBS[verb]._fields)) for verb in VERBS]
CASES += [("http", verb, over_http(verb)) for verb in VERBS if verb not in ("changed", "meet", "flush")]


@pytest.mark.parametrize(("transport", "verb", "names"), CASES, ids=lambda value: value if type(value) is str else "")
def test_whatever_a_field_holds_the_next_request_works(servers, transport, verb, names):
    server, fields, body = good(verb, servers, transport)
    client = {"tcp": Frames, "http": Http}[transport](server.urls[transport])
    with contextlib.closing(client):
        client.ask("register", {"worker": "w" if transport == "http" else '"w"'})
        server.store.leave("x")
        for name in [*names, "colour"]:
            if transport == "http" and name == "layout" and verb == "get":
                continue
            for text in wrong_values(name, transport) if name in RIGHT else ["1"]:
                if transport == "http" and name in ("names", "buffers") and text == "nonsense":
                    continue  # a list of one name
                _, fields, body = good(verb, servers, transport)
                before = server.store.version
                status, error = client.ask(verb, {**fields, name: text}, body)
                assert 400 <= status < 500, (name, text[:60], error)
                assert error.strip(), (name, text[:60])
                assert "\n" not in error
                assert server.store.version == before, "nothing has changed"
                _, fields, body = good(verb, servers, transport)
                status, error = client.ask(verb, fields, body)
                assert 200 <= status < 300, (name, text[:60], error)
    assert server.store.status()["broken"] is None


@pytest.mark.parametrize("transport", ["tcp", "http"])
@pytest.mark.parametrize(
    "verb", [verb for verb, request in VERBS.items() if len(request._fields) > len(request._field_defaults)]
)
def test_what_is_needed_and_missing_is_named(servers, transport, verb):
    if transport == "http" and verb in ("changed", "meet"):
        pytest.skip("not over HTTP")
    server, fields, body = good(verb, servers, transport)
    client = {"tcp": Frames, "http": Http}[transport](server.urls[transport])
    with contextlib.closing(client):
        for name in set(fields) - set(VERBS[verb]._field_defaults):
            status, error = client.ask(verb, {key: value for key, value in fields.items() if key != name}, body)
            assert (status, error) == (400, f"'{verb}' came without {name}")


def test_a_field_that_is_there_twice_is_refused(servers):
    client = Http(servers.alone.urls["http"])
    with contextlib.closing(client):
        client._connection.request("GET", "/parameters?min_version=0&min_version=1")
        response = client._connection.getresponse()
        assert (response.status, json.loads(response.read())["error"]) == (400, "min_version was given twice")


OPTIONS = [
    {"lr": "x"}, {"lr": -0.1}, {"lr": True}, {"lr": None}, {"lr": [0.1]}, {"lr": 10**400}, {"lr": 1e300},
    {"momentum": "x"}, {"momentum": -1}, {"momentum": False}, {"momentum": 1e300}, {"dampening": "x"},
    {"weight_decay": -1}, {"weight_decay": 1e300}, {"nesterov": 1}, {"nesterov": "no"}, {"maximize": None},
    {"foreach": "x"}, {"params": []}, {"colour": 1}, {"nesterov": True, "momentum": 0}, {"differentiable": 3},
]  # fmt: skip


@pytest.mark.parametrize("transport", ["tcp", "http"])
@pytest.mark.parametrize("staleness", [None, 0])
def test_options_that_an_optimizer_cannot_step_with_poison_nothing(tmp_path, transport, staleness):
    """A durable server: what is in its log can be read back."""

    def make():
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        options = {"staleness": staleness, "directory": tmp_path, "durable": True, "transports": (transport,)}
        return ParameterServer(net, optimizer, **options)

    torch.manual_seed(0)
    gradient = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    body = b"".join(encode(gradient))
    with make() as server:
        client = {"tcp": Frames, "http": Http}[transport](server.url)
        with contextlib.closing(client):
            worker = "w" if transport == "http" else '"w"'
            client.ask("register", {"worker": worker})
            for number, options in enumerate(OPTIONS, 1):
                fields = {"worker": worker, "sequence": str(number)}
                status, error = client.ask("update", {**fields, "options": json.dumps([options])}, body)
                assert 400 <= status < 500, (options, error)
                assert client.ask("update", fields, body) == (200, None)
            fields["sequence"] = str(number + 1)
            assert client.ask("update", {**fields, "options": '[{"lr": 0.25, "foreach": null}]'}, body) == (200, None)
    with make() as server:
        assert server.store.version == len(OPTIONS) + 1
        found = {name: value.clone() for name, value in server.store.tensors().items()}
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for number in range(len(OPTIONS) + 1):
        for name, parameter in net.named_parameters():
            torch.manual_seed(0)
            parameter.grad = gradient[name].clone()
        optimizer.param_groups[0]["lr"] = 0.1 if number < len(OPTIONS) else 0.25
        optimizer.step()
    assert all(torch.equal(found[name], value) for name, value in net.state_dict().items()), "as plain torch has it"
