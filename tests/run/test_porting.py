"""The scripts of docs/porting.md run, and hold what the page says of them."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evenstep
from evenstep.engine.results import Mean
from evenstep.testing import Fault, plant
from evenstep.testing.faults import struck
from workers import cli_run

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
BEFORE, AFTER, LANGUAGE, CONTRASTIVE, CARRIED, STREAMS, FILES, AVERAGED = SCRIPTS
MINE = """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    inputs = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long()
    train, test = TensorDataset(inputs[:400], labels[:400]), TensorDataset(inputs[400:], labels[400:])

    files = range(20)

    def read(some):
        return (train[n] for file in some for n in range(file, 400 - file, 20))

    def build():
        return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
"""


@pytest.fixture
def page(script, tmp_path, monkeypatch):
    """Writes a script of the page, with the reader's model and data beside it."""
    script(MINE, "mine.py")
    monkeypatch.chdir(tmp_path)
    return script


def accuracies(done):
    assert done.code == 0, done.stderr
    return [float(number) for number in re.findall(r"(?:accuracy|best) ([\d.]+)", done.stdout)]


def test_the_script_before_runs_and_learns(page):
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found = accuracies(cli_run("run", "-n", "1", page(BEFORE), variables=alone))
    assert len(found) == 4
    assert found[-1] > 0.85


def test_the_ported_script_learns_as_much_and_gives_one_result(page):
    path = page(AFTER)
    one, two = (cli_run("run", "-n", n, path) for n in ("1", "2"))
    assert one.stdout == two.stdout, "accuracies and fingerprint"
    assert len(accuracies(one)) == 4
    assert accuracies(one)[-1] > 0.85


def test_files_are_data_sets_as_the_page_shows_them(page, tmp_path):
    pa = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow: pip install 'evenstep[parquet]'")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"features": [[1.0, 2.0]] * 5, "label": [0, 1, 0, 1, 0]}), tmp_path / "train/a.parquet")
    np.save("images.npy", np.zeros((4, 8, 8), np.float32))
    np.save("labels.npy", np.zeros(4, np.int64))
    done = cli_run("run", "-n", "1", page(FILES))
    assert done.stdout.splitlines() == ["[0] 5 torch.Size([2])", "[0] torch.Size([8, 8])"], done.stderr


def test_averaged_weights_survive_the_loss_of_the_worker_that_averages(page, tmp_path):
    path = page(AVERAGED)
    undisturbed = cli_run("run", "-n", "1", path)
    killed = cli_run("run", "-n", "2", path, variables=plant([Fault("kill", "forward", 9)], tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0]
    assert killed.stdout == undisturbed.stdout
    assert accuracies(killed)[-1] > 0.85


def test_the_contrastive_loss_of_the_page_is_that_of_the_whole_batch():
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    with evenstep.Run(shards=3, quiet=True) as run:
        models = [torch.nn.Linear(4, 3).double() for _ in range(2)]
        model, _ = run.prepare(torch.nn.ModuleList(models), torch.optim.SGD(models[0].parameters(), 0.1))
        a, b = (F.normalize(model(x)) for model, x in zip(models, batch, strict=True))
        logits, labels = a @ b.T / 0.07, torch.arange(6)
        whole = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        names = {"F": F, "torch": torch, "run": run, "image_model": models[0], "text_model": models[1]}
        exec(CONTRASTIVE, names)  # the page's own words
        assert float(run.step(batch, names["loss_of"])) == pytest.approx(whole.item())
        assert model is not None


def test_the_carried_state_of_the_page_goes_on_from_step_to_step():
    class Model(torch.nn.GRU):
        def init_hidden(self, rows):
            return torch.zeros(1, rows, 5)

    with evenstep.Run(shards=2, seed=4, quiet=True) as run:
        model = Model(3, 5, batch_first=True)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.0))
        names = {"F": F, "run": run, "model": model}
        exec(CARRIED, names)  # the page's own words
        batch = torch.ones(4, 2, 3), torch.zeros(4, 2, dtype=torch.long)
        first, second = (float(run.step(batch, names["loss_of"])) for _ in range(2))
        names["hidden"].reset()
        assert first != second
        assert float(run.step(batch, names["loss_of"])) == first


def test_streams_end_on_one_result_whoever_reads_them(page, tmp_path):
    path = page(STREAMS)
    undisturbed = cli_run("run", "-n", "1", path)
    killed = cli_run("run", "-n", "3", path, variables=plant([Fault("kill", "backward", 8)], tmp_path / "faults"))
    assert struck(tmp_path / "faults") == [0]
    assert killed.stdout == undisturbed.stdout
    assert 0 < float(re.match(r"loss ([\d.]+)", killed.stdout).group(1)) < 0.4


def test_the_loss_of_a_language_model_is_the_mean_over_its_labels():
    targets = torch.tensor([[1, -100], [-100, -100], [0, 1]])
    names = {"evenstep": evenstep, "F": F, "model": torch.nn.Embedding(3, 2)}
    exec(LANGUAGE, names)  # the page's own words
    inputs = torch.tensor([[0, 1], [2, 0], [1, 1]])
    parts = [names["loss_of"]({"input_ids": inputs[rows], "labels": targets[rows]}) for rows in ([0], [1], [2])]
    mean = F.cross_entropy(names["model"](inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    means = [Mean.of("loss", part, 1) for part in parts]
    assert sum(m.total for m in means) / sum(m.weight for m in means) == pytest.approx(mean.item())
