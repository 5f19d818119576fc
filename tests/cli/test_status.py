"""`evenstep status` shows who computes which shards, and where the time goes."""

from evenstep.cli.status import described

WORKER = {
    "worker": 0, "pid": 4711, "step": 412, "shards": [0, 3], "shard": 1, "waiting": False, "member": True, "machine": 0,
    "compute_s": 6.0, "wait_s": 2.0, "exchange_s": 1.5, "update_s": 0.5,
}  # fmt: skip
JOB = {
    "script": "train.py", "uptime_s": 75.4, "generation": 2, "wanted": 3, "restarts": 1, "num_shards": 8,
    "machines": [{"machine": 0, "name": "here", "workers": [0, 1]}],
    "workers": [WORKER], "faults": [], "checkpoints": [],
}  # fmt: skip


def test_a_worker_has_its_step_its_shards_and_where_its_time_went():
    assert described(JOB) == [
        "train.py  up 1 min 15 s  shards 8",
        "generation 2  wanted 3  restarts 1",
        "worker 0  pid 4711  step 412  shards 0-2  compute 60 %  wait 20 %  exchange 15 %  update 5 %",
    ]


def test_one_that_has_done_nothing_yet_says_no_more_than_that():
    nothing = dict.fromkeys(["compute_s", "wait_s", "exchange_s", "update_s"], 0.0)
    joining = {**WORKER, "worker": 1, "shards": [0, 0], "step": 0, "member": False, **nothing}
    assert described({**JOB, "workers": [joining]})[-1] == "worker 1  pid 4711  step 0  joining"


def test_machines_faults_and_checkpoints_are_shown_where_there_are_any():
    lines = described({
        **JOB,
        "uptime_s": 7300.0,
        "num_shards": None,
        "machines": [{"machine": 0, "name": "a"}, {"machine": 1, "name": "b"}],
        "workers": [{**WORKER, "machine": 1, "shards": [3, 4]}],
        "faults": [[90.0, "the first", 0.2], [3.0, "worker 1 was killed", None]],
        "checkpoints": [[61.0, "checkpoints/step-400"]],
    })  # fmt: skip
    assert lines[0] == "train.py  up 2 h 1 min"
    assert lines[2:4] == ["machine 0  a  head", "machine 1  b"]
    assert lines[4].startswith("worker 0  pid 4711  step 412  machine 1  shards 3  compute")
    assert lines[5:] == [
        "last fault 3 s ago: worker 1 was killed; no step committed since",
        "last checkpoint 1 min 1 s ago: checkpoints/step-400",
    ]
    recovered = described({**JOB, "faults": [[3.0, "worker 1 was killed", 0.0411]]})[-1]
    assert recovered == "last fault 3 s ago: worker 1 was killed; a step committed 0.041 s later"
