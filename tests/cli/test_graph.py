import json

import networkx
import pytest

from evenstep.cli.main import main
from workers import cli_run

SCRIPT = """
    import torch
    from torch import nn
    import evenstep

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    def main():
        with evenstep.Run(shards=6) as run:
            inner = Net()
            setup(run, inner)
            raise SystemExit("this is never reached")

    def setup(run, innermost):
        try:
            return run.prepare(innermost, torch.optim.SGD(innermost.parameters(), 0.1))
        except Exception:
            print("nor is this")

    number = 7
    ready = Net()
    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize("name", ["inner", "innermost", "ready", "Net"])
def test_a_script_is_run_up_to_prepare_and_its_model_drawn(script, tmp_path, name):
    out = tmp_path / "net.json"
    done = cli_run("graph", f"{script(SCRIPT)}:{name}", "-n", "2", "--input", "3,4", "--out", out)
    assert done.code == 0, done.stderr
    assert done.stdout == f"written: {out} (5 nodes, 4 edges, by fx; 6 shards on 2 workers)\n"
    graph = networkx.node_link_graph(json.loads(out.read_text()), edges="edges")
    assert [graph.nodes[node]["label"] for node in networkx.topological_sort(graph)] == [
        "x",
        "a",
        "relu",
        "b",
        "output",
    ]
    assert graph.nodes["b"]["shape"] == [3, 2]


@pytest.mark.parametrize(("ending", "begin"), [("svg", "<svg "), ("html", "<!doctype html>")])
def test_pictures_are_written(script, tmp_path, ending, begin):
    out = tmp_path / f"net.{ending}"
    done = cli_run("graph", f"{script('from torch import nn; model = nn.Linear(2, 2)')}:model", "--out", out)
    assert done.code == 0, done.stderr
    assert out.read_text().startswith(begin)
    assert "8 shards on 1 workers" in done.stdout


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        (SCRIPT, "nothing", "has no 'nothing'; expected one of ready, inner, innermost"),
        ("x = 1", "model", "has no 'model'; the script has made no module by then"),
        ("model = 3", "model", "'model' of {path} is a int, expected a torch.nn.Module"),
        ("def model(n): pass", "model", "model() of {path} failed: TypeError: model() missing 1 required"),
        ("1 / 0", "model", "failed before it prepared a model: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "model", "failed before it prepared a model: SystemExit: 3"),
    ],
)
def test_a_script_without_that_model_is_refused(script, tmp_path, text, name, sentence):
    path = script(text)
    done = cli_run("graph", f"{path}:{name}", "--out", tmp_path / "x.svg")
    assert done.code == 2
    assert sentence.format(path=path) in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["train.py", "--out", "x.svg"],
            "'train.py' names no model; expected a script and a name, such as train.py:model",
        ),
        (["no.py:model", "--out", "x.svg"], "there is no script no.py; name a Python file to read"),
        ([f"{__file__}:m", "--out", "x.pdf"], "--out x.pdf, expected a name that ends in .json, .svg, .html"),
        ([f"{__file__}:m", "--out", "x.svg", "--shards", "0"], "--shards 0, expected a whole number from 1 to 256"),
        (
            [f"{__file__}:m", "--out", "x.svg", "--input", "3,q"],
            "--input 3,q, expected sizes above 0 and a dtype, such as 8,3,32,32 or 8,128:int64",
        ),
    ],
)
def test_a_mistake_is_one_sentence(argv, sentence, capsys):
    assert main(["graph", *argv]) == 2
    assert capsys.readouterr().err == f"evenstep: {sentence}\n"


def test_what_cannot_be_traced_is_said(script, tmp_path):
    text = """
        from torch import nn
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(2, 2)
            def forward(self, x):
                return self.inner(x) if float(x.sum()) else x
    """
    done = cli_run("graph", f"{script(text)}:Model", "--out", tmp_path / "x.svg")
    assert done.code == 0
    assert done.stderr.startswith("evenstep: fx could not trace it (TypeError: ")
    assert "this is the tree of modules" in done.stderr
