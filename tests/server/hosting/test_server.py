"""`evenstep server` from the shell."""

import json
import signal

import pytest

import processes
from evenstep.cli.main import main
from evenstep.server import connect
from workers import Cli

BUILDER = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), 0.5)

def number():
    return 7
"""


LOCK = "lock=False lets everyone change the parameters at any time; it needs staleness=None"
CERTIFICATE = "the certificate no cannot be used: [Errno 2] No such file or directory"


def test_it_serves_until_it_is_stopped_and_goes_on_where_it_was(script, tmp_path):
    path = script(BUILDER, "model.py")
    for expected in (1, 2):
        argv = ["server", f"{path}:build", "--staleness", "none", "--directory", tmp_path / "state", "--durable"]
        with Cli(*argv) as cli:
            cli.until_it_says("serving at", times=3)
            urls = [line.rpartition(" ")[2] for line in cli.stdout.splitlines()]
            assert [url.partition("://")[0] for url in urls] == ["http", "tcp", "memory"]
            with connect(urls[expected], worker="w") as client:
                assert client.update_parameters(client.get_parameters()) == expected
            cli.kill(signal.SIGTERM)
            done = cli.wait()
            assert done.code == 0
            events = [json.loads(line) for line in done.stderr.splitlines()]
            assert "worker 'w' registered" in [event["event"] for event in events]


def test_its_log_is_lines_of_json_with_the_figures_of_the_status(script):
    argv = ["server", f"{script(BUILDER, 'model.py')}:build", "--staleness", "none", "--transports", "tcp"]
    with Cli(*argv, "--log-every", "0.2") as cli:
        cli.until_it_says("serving at")
        with connect(cli.stdout.split()[-1], worker="w") as client:
            client.update_parameters(client.get_parameters())
            status = client.status()
            counted = '"requests": {"register": 1, "get": 1, "update": 1, "status": 1}'
            assert processes.until(lambda: counted in cli.stderr), cli.stderr
        cli.kill(signal.SIGTERM)
        done = cli.wait()
    assert done.code == 0
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    registered = {"level": "info", "event": "worker 'w' registered", "version": 0, "worker": "w"}
    assert registered in [{key: value for key, value in line.items() if key != "time"} for line in lines]
    figures = next(line["figures"] for line in lines if line.get("figures", {}).get("requests", {}).get("status"))
    for passing in ("uptime_s", "request_seconds", "requests"):
        del figures[passing]
    assert figures.pop("workers")[0]["updates"] == status["workers"][0]["updates"] == 1
    assert figures == {key: status[key] for key in figures}
    assert {"version", "copies", "dropped", "received_bytes", "sent_bytes", "refused"} <= figures.keys()


def test_elsewhere_than_on_loopback_a_token_is_made_and_printed(script):
    with Cli("server", f"{script(BUILDER, 'model.py')}:build", "--host", "0.0.0.0", "--transports", "tcp") as cli:
        cli.until_it_says("evenstep: token ")
        lines = cli.stdout.splitlines()
        url, token = lines[0].rpartition(" ")[2].replace("0.0.0.0", "127.0.0.1"), lines[1].rpartition(" ")[2]
        assert len(token) == 32
        with connect(url, token=token, register=False) as client:
            assert client.get_parameters()
        cli.kill(signal.SIGINT)
        assert cli.wait().code == 0


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["no.py:build"], "there is no file no.py; say what builds the model, such as model.py:build"),
        (["no.py"], "there is no file no.py; say what builds the model, such as model.py:build"),
        (["{model}:build", "--staleness", "x"], "--staleness x, expected a whole number, or none"),
        (["{model}:missing"], "{model} has no function 'missing'"),
        (["{model}:number"], "the function returned a int, expected a model or (model, optimizer)"),
        (["{model}:build", "--durable"], "durable=True needs a directory for its log and snapshots: directory=..."),
        (["{model}:build", "--no-lock"], LOCK),
        (["{model}:build", "--transports", "smoke"], "transports=('smoke',), expected some of http, tcp, memory"),
        (["{model}:build", "--certfile", "no"], CERTIFICATE),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_starts_nothing(script, argv, sentence):
    path = str(script(BUILDER, "model.py"))
    with Cli("server", *[text.replace("{model}", path) for text in argv]) as cli:
        done = cli.wait()
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"evenstep: {sentence.replace('{model}', path)}"


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["server", "--help"])
    text = capsys.readouterr().out
    for word in ("FILE:FUNCTION", "--staleness", "--durable", "--certfile", "--reject-nonfinite", "--snapshot-every"):
        assert word in text
