"""Runs on tasks of Spark: the result of `python train.py` on any number of executors, also when they are lost."""

import json
from pathlib import Path

import forks
import guests
from evenstep.cli.trace import events_of
from evenstep.picture import timeline
from guests import training


def run_it(session, directory):
    from evenstep.spark import run

    seen = []
    found = guests.run_and_look(
        lambda: run(training, directory, workers=(1, 3), session=session, quiet=True, on_progress=seen.append),
        directory,
        (3, None),
    )
    return found, seen[-1].epoch


def test_workers_on_executors_end_on_the_fingerprint_of_one_process(spark, fingerprint, tmp_path):
    assert spark.call(run_it, str(tmp_path)) == ((fingerprint, 3), guests.STEPS // 4 - 1)


def lose(session, directory):
    from evenstep.spark import run

    return guests.run_and_look(
        lambda: run(training, directory, workers=4, session=session, quiet=True),
        directory,
        (4, lambda: guests.kill("CoarseGrainedExecutorBackend")),
        (guests.FEWER, None),
        (4, lambda: guests.kill("evenstep.agents.agent_process")),
        (guests.FEWER, None),
        (4, None),
    )


def test_lost_executors_and_agents_cost_a_step_and_come_again(spark, fingerprint, tmp_path):
    assert spark.call(lose, str(tmp_path)) == (fingerprint, 4)


def interrupt(session, directory):
    from evenstep.spark import run

    return guests.interrupt(lambda: run(training, directory, workers=1, session=session, quiet=True), directory)


def test_an_interrupt_stops_after_the_step_with_a_checkpoint(spark, tmp_path):
    assert spark.call(interrupt, str(tmp_path)) == (["interrupted"], True)


def run_script(session, directory):
    from evenstep.spark import run

    out = f"{directory}/out"
    with forks.as_elsewhere(session.sparkContext.environment):
        figures = {"trace": f"{directory}/trace.json", "log_json": f"{directory}/steps.jsonl"}
        assert run(guests.put_script(directory), out, workers=1, session=session, quiet=True, **figures) is None
    return Path(out).read_text()


def test_a_script_runs_as_it_does_elsewhere_and_its_figures_are_written(spark, tmp_path):
    assert spark.call(run_script, str(tmp_path)) == guests.fingerprint_of_script(tmp_path)
    found = timeline.read(events_of(tmp_path / "trace.json"))[0]
    assert found.steps[0] == found.steps[1] > 0, "every step, of the worker that keeps the state and of the executor's"
    steps = [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert steps == list(range(1, found.steps[0] + 1))


def mistakes(session):
    from evenstep.spark import run

    slots = {"slots": lambda: run(guests.fails, workers=9, session=session, start_timeout_s=0.1)}
    return guests.said_by(**guests.common_mistakes(run, session=session), **slots)


def test_mistakes_get_a_sentence_and_errors_of_the_script_their_traceback(spark):
    said = spark.call(mistakes)
    guests.check_mistakes(said)
    assert said["slots"].startswith("ConfigError: 9 workers, but the application has 4 task slots")
