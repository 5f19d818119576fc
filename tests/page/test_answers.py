"""What is asked of a job is done, and said; what cannot be done is an error, and ends nothing."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.page.answers import answer


class Job:
    def __init__(self):
        self.done = []

    def scale(self, number):
        if number > 4:
            raise ConfigError("too many")
        return f"{number} workers"

    def ask_for_checkpoint(self):
        self.done.append("checkpoint")

    def ask_for_fingerprint(self):
        self.done.append("fingerprint")

    def stop(self):
        self.done.append("stop")

    def status(self):
        return {"generation": 1}


@pytest.mark.parametrize("what", ["checkpoint", "fingerprint", "stop"])
def test_what_is_asked_for_is_done_and_said(what):
    job = Job()
    assert "after this step" in answer(job, {what: True})["said"]
    assert job.done == [what]


def test_a_number_of_workers_is_had_or_refused():
    assert answer(Job(), {"scale": 3}) == {"said": "3 workers"}
    assert answer(Job(), {"scale": 5}) == {"error": "too many"}


@pytest.mark.parametrize("number", [None, "x", "3", 2.0, True, float("inf"), float("nan"), [1], {}, "9" * 500])
def test_what_is_no_number_of_workers_is_an_error_and_ends_nothing(number):
    said = answer(Job(), {"scale": number})["error"]
    assert said.endswith("expected a whole number of workers")
    assert len(said) < 120


@pytest.mark.parametrize("request_", [{"status": True}, {}, {"explode": True}])
def test_anything_else_gets_the_status(request_):
    assert answer(Job(), request_) == {"generation": 1}
