"""`evenstep run --trace` and `evenstep trace`, as a user has them: whoever dies, the file is whole and says so."""

import json
import re
import signal
import textwrap
import urllib.request

import pytest

import processes
from evenstep.cli.trace import events_of
from evenstep.launch import connection
from workers import Cli, cli_run

SCRIPT = """
    import os, signal, sys
    import torch
    import evenstep

    with evenstep.Run(shards=4, progress=False) as run:
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), 1e-2))

        def loss(part):
            if run.version == 7 and run.worker == 1 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return net(part[0]).pow(2).mean()

        for batch in run.batches(torch.utils.data.TensorDataset(torch.randn(40, 4)), 10, epochs=int(sys.argv[1])):
            run.step(batch, loss)
            run.print("step", run.version)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))


def spans_of(path):
    """Spans by thread, each (begin, end, category, name); and the worker of each thread."""
    spans, workers = {}, {}
    for event in events_of(path):
        thread = event["pid"], event["tid"]
        if event["ph"] == "X" and event["cat"] != "request":
            found = (event["ts"], event["ts"] + event["dur"], event["cat"], event["name"])
            spans.setdefault(thread, []).append(found)
        elif "worker" in event.get("args", {}):
            workers[thread] = event["args"]["worker"]
    return spans, workers


def test_what_every_worker_did_is_there_also_of_one_that_was_killed(script, tmp_path):
    done = cli_run("run", "-n", "2", "--trace", "trace.json", "train.py", "5")
    assert done.code == 0, done.stderr
    (victim,) = map(int, re.findall(r"worker 1 \(pid (\d+)\) was killed by SIGKILL", done.stderr))
    spans, workers = spans_of(tmp_path / "trace.json")
    assert workers[1, victim] == 1, "who replaced it, if it came before the end, has a thread of its own"
    dead = spans[1, victim]
    steps = [name for _, _, kind, name in dead if kind == "operation" and name.startswith("step")]
    assert steps == [f"step {n}" for n in range(7)], "everything up to its death"
    assert [name for _, _, kind, name in dead if kind == "unfinished"] == ["step 7, unfinished"]
    (first,) = (found for thread, found in spans.items() if workers[thread] == 0)
    committed = [name for _, _, kind, name in first if kind == "operation" and re.fullmatch(r"step \d+", name)]
    assert committed == [f"step {n}" for n in range(20)], "each step once"
    kinds = {kind for _, _, kind, _ in first}
    assert kinds >= {"forward", "backward", "exchange", "wait", "update", "commit", "recovery", "load", "compute"}
    assert {name for _, _, kind, name in first if kind == "exchange"} >= {"1 call 0 forward", "result"}
    for found in spans.values():
        assert_they_nest(found)
    untraced = cli_run("run", "-n", "1", "train.py", "5")
    assert re.findall("fingerprint .+", untraced.stdout) == re.findall("fingerprint .+", done.stdout) != []

    shown = cli_run("trace", "trace.json")
    assert shown.code == 0, shown.stderr
    assert "20 steps, 2 workers; milliseconds of a step" in shown.stdout
    assert "worker 1 was lost in step 7" in shown.stdout
    assert "the end of the run is not in it" not in shown.stdout
    assert re.search(r"worker 0 +0\.00 +\d+\.\d\d", shown.stdout), "worker 0 waits for worker 1, not for itself"


def test_groups_are_told_apart_and_what_they_wait_for_is_there(script, tmp_path):
    options = ("--groups", "2", "--workers-per-group", "2", "--servers", "2")
    done = cli_run("run", *options, "--trace", "trace.json", "train.py", "10")
    assert done.code == 0, done.stderr
    assert re.search(r"group [01]: worker 1 \(pid \d+\) was killed by SIGKILL", done.stderr)
    spans, workers = spans_of(tmp_path / "trace.json")
    named = [event["args"] for event in events_of(tmp_path / "trace.json") if event["name"] == "thread_name"]
    assert {(who["group"], who["worker"]) for who in named if "group" in who} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for group in range(2):
        theirs = [found for thread, found in spans.items() if thread[0] == group + 2 and workers[thread] == 0]
        (first,) = theirs
        committed = [name for _, _, kind, name in first if kind == "operation" and re.fullmatch(r"step \d+", name)]
        assert committed == [f"step {n}" for n in range(20)], "each step of this group once"
        waits = {name for _, _, kind, name in first if kind == "wait"}
        assert waits >= {"wait for the servers", "wait for all groups"}
    for found in spans.values():
        assert_they_nest(found)
    marks = [(e["pid"], e["name"]) for e in events_of(tmp_path / "trace.json") if e["ph"] == "i"]
    assert (1, "2 groups of 2 workers, 2 servers, a group may be any number of updates ahead") in marks
    died = sorted(map(int, re.findall(r"group (\d): worker 1 .* was killed", done.stderr)))
    assert sorted(pid - 2 for pid, text in marks if "killed by SIGKILL" in text) == died
    shown = cli_run("trace", "trace.json")
    assert shown.code == 0, shown.stderr
    assert [f"group {g}: 20 steps, 2 workers; milliseconds of a step" in shown.stdout for g in range(2)] == [True] * 2
    assert "for the servers" in shown.stdout
    updates = re.findall(r"server (\d), update +(\d+) ", shown.stdout)
    assert [server for server, _ in updates] == ["0", "1"]
    assert sum(int(count) for _, count in updates) >= 2 * 20 * 3, "of each group, step and layer with parameters"
    assert "the end of the run is not in it" not in shown.stdout


def assert_they_nest(spans):
    """Perfetto draws spans of one thread only if each lies inside another or outside it."""
    ends = []
    for begin, end, _, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= begin + 0.002:
            ends.pop()
        assert not ends or end <= ends[-1] + 0.002, name
        ends.append(end)


def test_the_file_is_whole_even_if_the_supervisor_is_killed(script, tmp_path):
    path = tmp_path / "trace.json"
    with Cli("run", "-n", "2", "--trace", "trace.json", "train.py", "100000") as cli:
        cli.until_it_says("step 20")
        assert processes.until(lambda: b'"step 15"' in path.read_bytes(), 60.0)
        children = processes.descendants(cli.pid)
        cli.kill(signal.SIGKILL)
        cli.wait()
    assert processes.until(lambda: not any(map(processes.is_alive, children)))
    json.loads(path.read_text())
    shown = cli_run("trace", "trace.json")
    assert shown.code == 0
    assert shown.stdout.splitlines()[-1] == "the end of the run is not in it: the run goes on, or was killed"


def test_machines_are_on_one_clock_and_on_one_page(script, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_BEAT_S", 0.01)  # of many beats one is quick, also where others work
    (tmp_path / "killed").touch()
    several = ("--listen", "127.0.0.1:0", "--machines", "2", "--weights", "1", "--silence", "30")
    with Cli("run", "-n", "1", *several, "--page", "--trace", "trace.json", "train.py", "100000") as cli:
        assert processes.until(lambda: "evenstep join" in cli.stderr and "token" in cli.stderr, 30.0)
        page, address = (re.search(rf"{word} ([^\s,]+)", cli.stderr)[1] for word in ("page", "evenstep join"))
        with Cli("join", address, "-n", "1") as other:
            cli.until_it_says("step 120\n")
            assert processes.until(lambda: all(w["step"] > 50 for w in shown_by(page)["workers"]), 60.0)
            found = shown_by(page)
            cli.kill(signal.SIGTERM)
            done = cli.wait()
            assert done.code == 75, done.stderr
            other.wait()
    assert [m["workers"] for m in found["machines"]] == [[0], [1]]
    assert [(w["machine"], w["shards"]) for w in found["workers"]] == [(0, [0, 2]), (1, [2, 4])]
    assert all(w["compute_s"] > 0 for w in found["workers"])
    assert found["step"] > 50
    spans, workers = spans_of(tmp_path / "trace.json")
    assert sorted((process, workers[process, thread]) for process, thread in spans) == [(1, 0), (2, 1)]
    one, two = ({name: span[:2] for *span, name in found} for found in spans.values())
    last = sorted((name for name in one.keys() & two.keys() if name.startswith("step ")), key=lambda name: one[name])[
        -50:
    ]
    assert len(last) == 50
    assert all(one[name][0] < two[name][1] and two[name][0] < one[name][1] for name in last), "they step together"


def shown_by(page):
    with urllib.request.urlopen(f"{page}/status", timeout=20) as reply:
        return json.loads(reply.read())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("loss 0.5", "bad is not a trace, since it is not JSON"),
        ('{"traceEvents": []}', "bad is not a trace of a run"),
        ("[]", "bad is not a trace of a run"),
        ('{"otherData": {"evenstep trace": 1}, "traceEvents": [{"ph": "X"}]}', "bad has events that evenstep did not"),
        (None, "bad cannot be read: No such file"),
    ],
)
def test_what_is_no_trace_is_one_sentence(content, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "bad").write_text(content)
    from evenstep.cli.main import main

    assert main(["trace", "bad"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_found_before_anything_starts(script):
    done = cli_run("run", "-n", "2", "--trace", "/nowhere/trace.json", "train.py", "1")
    assert done.code == 2
    assert done.stderr.strip() == (
        "evenstep: --trace: cannot write /nowhere/trace.json: No such file or directory; name another file"
    )
