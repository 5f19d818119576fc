"""A script and a module run as they would under Python itself."""

import sys

import pytest

from evenstep.cli.main import main
from workers import cli_run


@pytest.fixture
def package(script, tmp_path, monkeypatch):
    """A package with a module that trains, seen from the working directory."""
    (tmp_path / "recipes").mkdir()
    script("WIDTH = 3", "recipes/__init__.py")
    script("from recipes import WIDTH", "recipes/sizes.py")
    script(
        """
        import sys
        import torch
        import evenstep
        from .sizes import WIDTH

        with evenstep.Run(shards=4) as run:
            model = torch.nn.Linear(WIDTH, 1)
            model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            run.step(torch.ones(8, WIDTH), lambda part: model(part).square().mean())
            run.print(__name__, __spec__.name, sys.argv[0].endswith("train.py"), sys.argv[1:])
        """,
        "recipes/train.py",
    )
    script("import missing_elsewhere", "recipes/broken.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_module_runs_as_under_python(package):
    done = cli_run("run", "-n", "2", "-m", "recipes.train", "-m", "--flag", "x")
    assert done.code == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "__main__ recipes.train True ['-m', '--flag', 'x']"
    assert second.startswith("fingerprint ")
    assert done.stderr == ""


def test_verify_takes_a_module_too(warm, package, capsys):
    assert main(["verify", "--workers", "1,2", "-m", "recipes.train"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all equal, at every step"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "there is no module nowhere"),
        ("recipes.nowhere", "there is no module recipes.nowhere"),
        ("recipes", "recipes is a package without a __main__ module; name the module in it that trains"),
        ("recipes/train.py", "there is no module recipes/train.py"),
    ],
)
def test_a_module_that_cannot_be_run_is_one_sentence(package, name, said):
    done = cli_run("run", "-n", "2", "-m", name)
    assert done.code == 2
    assert done.stderr.count(f"evenstep: {said}") == 1
    assert "Traceback" not in done.stderr


def test_an_import_that_fails_inside_of_a_module_keeps_its_traceback(package):
    done = cli_run("run", "-n", "1", "-m", "recipes.broken")
    assert done.code == 1
    assert "ModuleNotFoundError: No module named 'missing_elsewhere'" in done.stderr
    assert "runpy" not in done.stderr
    assert sys.argv[0] != "recipes.broken"
