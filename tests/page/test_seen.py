"""What is kept of a run for its page: faults have a recovery time once a step was committed after them."""

from evenstep.page import seen
from evenstep.page.seen import Seen


def test_a_step_ends_all_faults_that_nobody_had_recovered_from(monkeypatch):
    now = iter(range(100, 200))
    monkeypatch.setattr(seen, "monotonic", lambda: next(now))
    kept = Seen()
    kept.lost("worker 1 was killed")
    kept.lost("worker 2 was killed")
    kept.recovered(0.25)
    kept.lost("worker 0 was killed")
    kept.saved("checkpoints/step-1")
    kept.fingerprint(7, "abc")
    assert kept.described([(103, "a sentence")]) == {
        "uptime_s": 5,
        "events": [[2, "a sentence"]],
        "faults": [
            [4, "worker 1 was killed", 0.25],
            [3, "worker 2 was killed", 0.25],
            [2, "worker 0 was killed", None],
        ],
        "checkpoints": [[1, "checkpoints/step-1"]],
        "fingerprint": (7, "abc"),
    }
