"""What only HTTP has: curl, browsers, Prometheus, and the mischief that comes with them."""

import http.client
import json
import re
from urllib.parse import urlsplit

import pytest
import safetensors.torch
import torch
from torch import nn

from evenstep.server import Limits, ParameterServer, connect


@pytest.fixture
def server():
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    limits = Limits(body_bytes=1 << 20, idle_s=0.5)
    with ParameterServer(net, optimizer, staleness=None, transports=("http",), limits=limits) as server:
        yield server


def ask(server, method, path, body=None, **headers):
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        if body is not None:
            headers = {"content-type": "application/octet-stream", **headers}
        connection.request(method, path, body, {key.replace("_", "-"): value for key, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.getheaders(), response.read()
    finally:
        connection.close()


def test_plain_requests_are_enough(server):
    """What curl would do."""
    assert ask(server, "POST", "/register?worker=me")[0] == 200
    status, headers, body = ask(server, "GET", "/parameters?names=bias")
    before = safetensors.torch.load(body)
    assert (status, list(before), dict(headers)["x-evenstep-version"]) == (200, ["bias"], "0")
    update = safetensors.torch.save({"bias": torch.ones(2)}, {"format": "pt"})
    status, _, text = ask(server, "POST", "/update?worker=me&sequence=1", update)
    assert (status, json.loads(text)["version"]) == (200, 1)
    after = safetensors.torch.load(ask(server, "GET", "/parameters?min_version=1&since=0")[2])
    assert torch.equal(after["bias"], before["bias"] - 0.5)
    assert ask(server, "GET", "/parameters?min_version=9")[0] == 202
    assert ask(server, "HEAD", "/parameters")[2] == b""
    assert ask(server, "POST", "/leave?worker=me")[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("GET", "/parameters?names=nothing", None, {}, 404, "there is no parameter 'nothing'"),
        ("GET", "/parameters?min_version=x", None, {}, 400, "min_version='x' is no JSON"),
        ("GET", "/parameters?min_version=-1", None, {}, 400, "expected a whole number from 0"),
        ("GET", "/parameters?colour=red", None, {}, 400, "there is no parameter 'colour'"),
        ("POST", "/update?worker=me&sequence=1", b"", {}, 400, "'update' came without tensors"),
        ("POST", "/update?worker=me&sequence=1", b"nonsense", {}, 400, "the head of the tensors is"),
        ("POST", "/update?worker=me&sequence=1", b"\x04" + 7 * b"\0" + b"abcd", {}, 400, "is no JSON"),
        ("POST", "/update?worker=me&sequence=1", b"x", {"content_type": "text/plain"}, 415, "Content-Type is"),
        ("POST", "/update?worker=me&sequence=1", b"x", {"content_length": "99999999"}, 413, "at most 1048576"),
        ("POST", "/update?worker=me&sequence=1", b"\x10", {"content_length": "200"}, 408, "the body came too slowly"),
        ("GET", "/status", None, {"host": "evil.example"}, 403, "this server is called"),
        ("GET", "/status", None, {"origin": "http://evil.example"}, 403, "a page from elsewhere"),
        ("GET", "/nowhere", None, {}, 404, ""),
        ("DELETE", "/parameters", None, {}, 411, ""),
        ("GET", "/" + "a" * 40000, None, {}, 400, ""),
        ("GET", "/", None, {"x_long": "a" * 40000}, 400, ""),
    ],
)
def test_a_wrong_request_is_4xx_with_one_sentence_and_changes_nothing(
    server, method, path, body, headers, status, words
):
    ask(server, "POST", "/register?worker=me")
    found, _, text = ask(server, method, path, body, **headers)
    assert found in (status, 405), text
    assert words in text.decode()
    assert server.store.version == 0
    assert ask(server, "GET", "/status")[0] == 200


def test_metrics_are_what_prometheus_reads(server):
    with connect(server.url, worker='a"b\\') as client:
        client.update_parameters(client.get_parameters())
        text = ask(server, "GET", "/metrics")[2].decode()
    for line in text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) .*|evenstep_server_\w+({(\w+="([^"\\]|\\.)*",?)*})? [-+.e\d]+', line), line
    assert "evenstep_server_version 1\n" in text
    assert 'evenstep_server_requests_total{verb="update"} 1\n' in text
    assert 'evenstep_server_worker_lag{worker="a\\"b\\\\"} 0\n' in text


def test_the_description_names_every_route(server):
    api = json.loads(ask(server, "GET", "/openapi.json")[2])
    assert api["openapi"].startswith("3.")
    for path, methods in api["paths"].items():
        for method in methods:
            assert ask(server, method.upper(), path)[0] != 404, path
    assert set(api["paths"]) == {
        "/parameters", "/update", "/register", "/leave", "/wait", "/status", "/metrics", "/slice", "/stage", "/order",
        "/pause",
    }  # fmt: skip


def test_the_page_needs_nothing_from_elsewhere(server):
    status, headers, body = ask(server, "GET", "/")
    text = body.decode()
    assert status == 200
    assert "default-src 'none'" in dict(headers)["content-security-policy"]
    assert not re.search(r"(src|href)=", text)
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert "innerHTML" not in text, "names of workers are text"
