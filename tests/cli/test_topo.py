import io
import json
import os

import pytest

from evenstep.cli.main import main
from evenstep.topology import from_json
from workers import cli_run

TWO = {"format": 1, "machines": [{"name": "n", "count": 2, "devices": [{"name": "a"}, {"name": "b"}]}]}


@pytest.fixture
def machines(tmp_path):
    path = tmp_path / "machines.json"
    path.write_text(json.dumps(TWO))
    return path


def test_the_matrix_the_tree_and_the_pairs_are_printed(machines, capsys):
    assert main(["topo", "--from", str(machines), "--devices", "n1/b,n0/a,n0/b", "--shards", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 devices on 2 machines" in out
    assert "shards 0-3 on n0/a" in out or "shards 0-3 on n1/b" in out
    assert "Caffe's root: n1/b, and pairs: n0/a:n0/b n1/b:n0/a" in out


def test_what_is_written_as_json_can_be_read_again_and_holds_the_plan(machines, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["topo", "--from", str(machines), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert from_json(found).num_devices == 4
    assert [each["shards"] for each in found["plan"]["devices"]] == [[0, 2], [2, 4], [4, 6], [6, 8]]
    assert main(["topo", "--from", str(out)]) == 0
    assert capsys.readouterr().out.count("4 devices on 2 machines") == 2


def test_a_picture_is_written(machines, tmp_path):
    out = tmp_path / "out.svg"
    assert main(["topo", "--from", str(machines), "--out", str(out)]) == 0
    assert out.read_text().startswith("<svg ")


def test_plans_are_compared(machines, capsys):
    assert main(["topo", "--simulate", str(machines), "--bytes", "2G"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 devices on 2 machines, 8 shards, 2 GB of gradients\n")
    assert out.count("tree") == 3


def test_a_step_of_a_run_is_predicted_from_what_a_shard_takes(tmp_path, capsys):
    path = tmp_path / "many.json"
    network = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-3}
    machines = [{"name": "n", "count": 1000, "devices": [{"name": "a"}]}]
    path.write_text(json.dumps({"format": 1, "links": {"network": network}, "machines": machines}))
    assert main(["topo", "--simulate", str(path), "--shard-seconds", "0.3", "--bytes", "1G"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "a step of a run: 2.5 s "
        "(300 ms computing, 1.8 s for gradients that computing does not hide, 404 ms in meetings)"
    )
    assert main(["topo", "--shard-seconds", "1"]) == 2
    assert "give it with --simulate FILE" in capsys.readouterr().err
    assert main(["topo", "--simulate", str(path), "--shard-seconds", "-1"]) == 2
    assert "--shard-seconds -1.0, expected a number of at least 0" in capsys.readouterr().err


def test_the_text_of_nvidia_smi_comes_through_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("GPU0 GPU1 CPU Affinity\nGPU0 X NV2 0\nGPU1 NV2 X 0\n"))
    assert main(["topo", "--from", "-"]) == 0
    assert "shards 4-7 on gpu1   nvlink to gpu0" in capsys.readouterr().out


def test_what_comes_through_a_pipe_can_be_simulated(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("GPU0 GPU1 CPU Affinity\nGPU0 X NV2 0\nGPU1 NV2 X 0\n"))
    assert main(["topo", "--simulate", "-"]) == 0
    assert capsys.readouterr().out.startswith("2 devices on 1 machine, 8 shards")


def test_a_terminal_that_cannot_show_the_lines_of_a_tree_gets_the_rest(machines, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["topo", "--from", str(machines)]) == 0
    terminal.flush()
    assert b"?? shards 0-3 on n0/a" in terminal.buffer.getvalue()


def test_machines_come_through_a_pipe_as_well(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(TWO)))
    assert main(["topo", "--from", "-"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("?"))
    assert main(["topo", "--from", "-"]) == 2
    assert capsys.readouterr().err == (
        "evenstep: standard input is neither a JSON object of machines nor the text of `nvidia-smi topo -m`\n"
    )


def test_this_machine_is_shown_and_measured():
    assert main(["topo"]) == 0
    done = cli_run("topo", "--measure")
    assert done.code == 0, done.stderr
    assert f"core{min(os.sched_getaffinity(0))}" in done.stdout


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--out", "x.png"], "--out x.png, expected a name that ends in .svg or .json"),
        (["--bytes", "many"], "--bytes many, expected a number above 0 such as 250M or 2G"),
        (["--bytes", "-1"], "--bytes -1, expected a number above 0 such as 250M or 2G"),
        (["--devices", "n0/a,q"], "--devices names 'q', expected some of n0/a, n0/b, n1/a, n1/b"),
        (["--shards", "2"], "4 devices but 2 shards: every device needs one; use at least as many shards"),
        (["--shards", "2000000000"], "--shards 2000000000, expected a whole number from 1 to 1000000"),
        (["--out", "/nowhere/x.svg"], "--out /nowhere/x.svg cannot be written: No such file or directory"),
    ],
)
def test_a_mistake_is_one_sentence(argv, sentence, machines, capsys):
    assert main(["topo", "--from", str(machines), *argv]) == 2
    assert capsys.readouterr().err == f"evenstep: {sentence}\n"


def test_simulating_is_about_all_devices(machines, capsys):
    assert main(["topo", "--simulate", str(machines), "--devices", "n0/a"]) == 2
    assert "leave out --devices" in capsys.readouterr().err
