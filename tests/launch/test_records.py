"""Files of figures are what others read: JSON as Python's parser does, events as TensorBoard does."""

import json
import math

import pytest

from evenstep.core.errors import ConfigError
from evenstep.exchange.figures import StepFigures
from evenstep.launch.records import EventFile, JsonLines

FIRST = StepFigures(1, 1, 0.5, {"hits": 0.25, "words": ["a"]}, 22, 3.0, {"lr": 0.1})
ODD = StepFigures(1, 300, math.nan, {"up": math.inf, "down": -math.inf, "large": 1e300}, 22, None, {})
LAST = StepFigures(2, 300, None, {}, 0, None, {"accuracy": 0.75})


def test_every_step_is_a_line_of_json(tmp_path):
    path = tmp_path / "steps.json"
    for found in (FIRST, ODD, LAST):
        lines = JsonLines(path)  # a file that is there is gone on with
        lines.add(found)
        lines.close()

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    first, odd, last = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    del first["time"], last["time"]
    assert first == {
        "run": 1,
        "step": 1,
        "loss": 0.5,
        "metrics": {"hits": 0.25, "words": ["a"]},
        "samples": 22,
        "grad_norm": 3.0,
        "logged": {"lr": 0.1},
    }
    assert odd["loss"] == "NaN"
    assert odd["metrics"] == {"up": "Infinity", "down": "-Infinity", "large": 1e300}
    assert last == {"run": 2, "step": 300, "samples": 0, "logged": {"accuracy": 0.75}}


def test_tensorboard_reads_the_events(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    events = EventFile(tmp_path / "new" / "board")
    for found in (FIRST, ODD, LAST):
        events.add(found)
    events.close()
    (path,) = (tmp_path / "new" / "board").iterdir()
    version, *steps = loader.EventFileLoader(str(path)).Load()
    assert version.file_version == "brain.Event:2"
    values = [(event.step, {v.tag: v.tensor.float_val[0] for v in event.summary.value}) for event in steps]
    assert values[0] == (1, pytest.approx({"loss": 0.5, "grad_norm": 3.0, "hits": 0.25, "lr": 0.1}))
    assert values[1] == (
        300,
        pytest.approx({"loss": math.nan, "up": math.inf, "down": -math.inf, "large": math.inf}, nan_ok=True),
    )
    assert values[2] == (300, {"run 2/accuracy": 0.75})


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--log-json: cannot write .*: Not a directory; name another file"):
        JsonLines(tmp_path / "file" / "steps.json")
    with pytest.raises(ConfigError, match=r"--tensorboard: cannot create .*; name another directory"):
        EventFile(tmp_path / "file" / "board")
