"""What to run, by default."""

from pathlib import Path

from evenstep.launch.job import Job


def test_a_job_is_its_script_and_workers_and_else_replaces_any_number():
    job = Job(Path("train.py"), ("-x",), 2)
    assert (job.max_restarts, job.grace_s, job.resume, job.standing) == (None, 30.0, False, None)
