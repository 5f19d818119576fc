import os

import pytest

from evenstep.core import env
from evenstep.core.env import Environment
from evenstep.core.errors import ConfigError


@pytest.fixture
def variables(monkeypatch):
    """Sets exactly these variables of ours and of torchrun's."""
    for name in list(os.environ):
        if name.startswith("EVENSTEP_") or name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name)

    def set_all(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_a_process_without_variables_is_one_worker(variables):
    assert env.read() == Environment(worker=0, num_workers=1, segment_fd=None, torchrun=False)


@pytest.mark.parametrize("shards", [None, 6])
def test_what_the_launcher_writes_a_worker_reads(variables, shards):
    variables(env.worker_variables(2, 5, shards, 11, 12))
    assert env.read() == Environment(worker=2, num_workers=5, shards=shards, segment_fd=11, events_fd=12)


def test_where_a_group_stands_is_handed_on_as_it_is(variables):
    variables(env.worker_variables(0, 1, None, 11, 12, standing="{}", job="abc"))
    assert (env.read().standing, env.read().job) == ("{}", "abc")


@pytest.mark.parametrize("machines", [None, (), (0, 0, 1)])
def test_a_worker_learns_whether_there_may_be_other_machines(variables, machines):
    variables(env.worker_variables(0, 3, None, 11, 12, machines=machines))
    assert env.read().machines == machines


def test_the_place_under_torchrun_is_torchruns(variables):
    variables({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost"})
    assert env.read() == Environment(worker=1, num_workers=3, torchrun=True)


def test_the_launchers_place_beats_torchruns(variables):
    variables({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", **env.worker_variables(0, 2, None, 5, 6)})
    assert env.read().num_workers == 2


def test_variables_of_a_job_scheduler_are_not_torchruns(variables):
    variables({"RANK": "1", "WORLD_SIZE": "3"})
    assert env.read().num_workers == 1


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"EVENSTEP_WORKER": "first"}, "EVENSTEP_WORKER is 'first', expected a whole number; unset or correct it"),
        ({"EVENSTEP_SHARDS": ""}, "EVENSTEP_SHARDS is '', expected a whole number; unset or correct it"),
        (
            {"EVENSTEP_WORKER": "2", "EVENSTEP_WORKERS": "2"},
            "EVENSTEP_WORKER is 2 but EVENSTEP_WORKERS is 2: expected a number from 0 to 1",
        ),
        (
            {"EVENSTEP_WORKER": "-1", "EVENSTEP_WORKERS": "2"},
            "EVENSTEP_WORKER is -1 but EVENSTEP_WORKERS is 2: expected a number from 0 to 1",
        ),
        (
            {"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "x"},
            "RANK is 4 but WORLD_SIZE is 4: expected a number from 0 to 3",
        ),
        ({"EVENSTEP_MACHINES": "0,x"}, "EVENSTEP_MACHINES is '0,x', expected whole numbers; unset or correct it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_variables_that_make_no_sense_are_named(variables, values, sentence):
    variables(values)
    with pytest.raises(ConfigError) as caught:
        env.read()
    assert str(caught.value) == sentence


def test_reading_writes_nothing_and_writing_sets_what_it_is_given(variables, monkeypatch):
    before = dict(os.environ)
    env.read()
    assert dict(os.environ) == before
    monkeypatch.setenv("EVENSTEP_WORKER", "0")  # so that it is taken back
    env.write({"EVENSTEP_WORKER": "7"})
    assert os.environ["EVENSTEP_WORKER"] == "7"
