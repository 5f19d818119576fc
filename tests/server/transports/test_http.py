"""What only HTTP has: curl, browsers, Prometheus, and the mischief that comes with them."""

import http.client
import json
import re
import socket
from urllib.parse import urlsplit

import pytest
import safetensors.torch
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from evenstep.server import Limits, ParameterServer, connect
from evenstep.server.service.requests import VERBS


@pytest.fixture
def server():
    with serve(Limits(body_bytes=1 << 20)) as server:
        yield server


def serve(limits):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    return ParameterServer(net, optimizer, staleness=None, transports=("http",), limits=limits)


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
        ("GET", "/parameters?min_version=x", None, {}, 400, "min_version='x' is not JSON"),
        ("GET", "/parameters?min_version=-1", None, {}, 400, "expected a whole number from 0"),
        ("GET", "/parameters?colour=red", None, {}, 400, "'get' has no field 'colour'"),
        ("POST", "/update?worker=me&sequence=1", b"", {}, 400, "'update' came without tensors"),
        ("POST", "/update?worker=me&sequence=1", b"nonsense", {}, 400, "the head of the tensors is"),
        ("POST", "/update?worker=me&sequence=1", b"\x04" + 7 * b"\0" + b"abcd", {}, 400, "is not JSON"),
        ("POST", "/update?worker=me&sequence=1", b"x", {"content_type": "text/plain"}, 415, "Content-Type is"),
        ("POST", "/update?worker=me&sequence=1", b"x", {"content_length": "99999999"}, 413, "at most 1048576"),
        ("GET", "/status", None, {"host": "evil.example"}, 403, "this server is called"),
        ("GET", "/status", None, {"origin": "http://evil.example"}, 403, "a page from elsewhere"),
        ("GET", "/nowhere", None, {}, 404, ""),
        ("DELETE", "/parameters", None, {}, 411, ""),
        ("GET", "/" + "a" * 40000, None, {}, 431, "more than 32768 bytes"),
        ("GET", "/", None, {"x_long": "a" * 40000}, 431, "more than 32768 bytes"),
        ("GET", "/status", None, {"sec_fetch_site": "cross-site"}, 403, "a page from elsewhere"),
        ("GET", "/status", None, {"sec_fetch_site": "same-site"}, 403, "a page from elsewhere"),
        ("GET", "/parameters", None, {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}, 403, "elsewhere"),
        ("GET", "/openapi.json", None, {"sec_fetch_site": "cross-site"}, 403, "a page from elsewhere"),
        ("GET", "/", None, {"sec_fetch_site": "cross-site", "sec_fetch_dest": "script"}, 403, "a page from elsewhere"),
        ("GET", "/", None, {"host": "evil.example"}, 403, "this server is called"),
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


def test_a_body_that_comes_too_slowly_is_refused_and_changes_nothing():
    with serve(Limits(idle_s=0.5)) as server:
        ask(server, "POST", "/register?worker=me")
        found, _, text = ask(server, "POST", "/update?worker=me&sequence=1", b"\x10", content_length="200")
        assert (found, json.loads(text)["error"]) == (408, "the body came too slowly")
        assert server.store.version == 0
        assert ask(server, "GET", "/status")[0] == 200


def say(server, text):
    """Send a request as it is; return the answer."""
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as stream:
        stream.sendall(text.replace("\n", "\r\n").encode())
        stream.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: stream.recv(65536), b"")).decode()


@pytest.mark.parametrize("path", ["/status", "/", "/parameters"])
def test_a_request_has_one_host(server, path):
    host = urlsplit(server.url).netloc
    answer = say(server, f"GET {path} HTTP/1.1\nHost: {host}\nHost: evil.example\n\n")
    assert answer.startswith("HTTP/1.1 400 ")
    assert "the request has 2 Host headers, expected one" in answer
    answer = say(server, f"GET {path} HTTP/1.1\nHost: {host}\nOrigin: http://{host}\nOrigin: http://evil.example\n\n")
    assert answer.startswith("HTTP/1.1 403 ")


def test_a_person_may_come_by_a_link_and_the_page_may_ask(server):
    by_link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert ask(server, "GET", "/", **by_link)[0] == 200
    assert ask(server, "GET", "/", sec_fetch_site="none")[0] == 200
    assert ask(server, "GET", "/status", sec_fetch_site="same-origin")[0] == 200


def test_prometheus_reads_the_figures_of_the_status(server):
    with connect(server.url, worker='a"b\\') as client:
        gradients = client.get_parameters()
        for _ in range(3):
            client.update_parameters(gradients)
        server.store.state.version = 123_456_789  # every digit counts
        ask(server, "GET", "/parameters?min_version=-1")
        status = json.loads(ask(server, "GET", "/status")[2])
        _, headers, text = ask(server, "GET", "/metrics")
    assert dict(headers)["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(text.decode()))
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families)
    found = {
        (sample.name.removeprefix("evenstep_server_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    (worker,) = status["workers"]
    assert found.pop(("uptime_seconds",)) >= status["uptime_s"] > 0
    assert found.pop(("worker_last_seen_seconds", 'a"b\\')) >= worker["last_seen_s"] >= 0
    seconds = {verb: found.pop(("request_seconds_total", verb)) for verb in ("register", "get", "update", "status")}
    assert all(value >= status["request_seconds"].get(verb, 0.0) > -1 for verb, value in seconds.items())
    assert status["version"] == 123_456_789
    assert (status["dropped"], status["broken"], status["refused"]) == (0, None, {"400": 1})
    assert status["requests"] == {"register": 1, "get": 1, "update": 3}
    assert status["received_bytes"] > 3 * status["num_bytes"] == 3 * 32
    assert found == {
        ("version",): status["version"],
        ("parameter_bytes",): status["num_bytes"],
        ("copies",): status["copies"],
        ("broken",): 0,
        ("workers",): 1,
        ("workers_dropped_total",): 0,
        ("worker_lag", 'a"b\\'): worker["lag"],
        ("worker_updates_total", 'a"b\\'): 3,
        **{("requests_total", verb): count for verb, count in {**status["requests"], "status": 1}.items()},
        ("refused_total", "400"): 1,
        ("received_bytes_total",): status["received_bytes"],
        ("sent_bytes_total",): status["sent_bytes"],
    }


def test_the_description_names_every_route(server):
    api = json.loads(ask(server, "GET", "/openapi.json")[2])
    assert api["openapi"].startswith("3.")
    for path, methods in api["paths"].items():
        for method in methods:
            assert ask(server, method.upper(), path)[0] != 404, path
            request = VERBS.get(operation := methods[method]["operationId"])
            named = {each["name"] for each in methods[method].get("parameters", [])} if request else set()
            framed = {"optimizer", "place_only"} | ({"layout"} if operation == "get" else set())
            assert named == set(request._fields if request else ()) - framed, path
    assert set(api["paths"]) == {
        "/parameters", "/update", "/register", "/leave", "/wait", "/status", "/metrics", "/slice", "/stage", "/order",
        "/pause",
    }  # fmt: skip


def test_the_page_needs_nothing_from_elsewhere(server):
    status, headers, body = ask(server, "GET", "/")
    text = body.decode()
    assert status == 200
    assert "default-src 'none'" in dict(headers)["content-security-policy"]
    assert re.findall(r"(?:src|href)=(\S+)>", text) == ['"data:,"'], "no icon, and nothing else"
    assert len(re.findall(r"(?:src|href)=", text)) == 1
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert "innerHTML" not in text, "names of workers are text"
