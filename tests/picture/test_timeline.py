"""What a trace comes to: worked out by hand."""

from evenstep.picture.timeline import read, render, requests


def named(worker, tid, pid=1, **more):
    return {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": "w", "worker": worker, **more}}


def span(tid, cat, begin, end, name="", pid=1, **args):
    return {"ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": end - begin, "cat": cat, "name": name, "args": args}


EVENTS = [
    {"ph": "i", "s": "g", "pid": 1, "tid": 1, "ts": 0, "cat": "supervisor", "name": "said"},
    named(0, 10),
    named(1, 11),
    # inner spans come before those that they are in, as workers write them
    span(10, "forward", 1000, 3000, shard=0),
    span(10, "wait", 3500, 4500, "wait for worker 1", worker=1),
    span(10, "exchange", 3400, 4600, "layer"),
    span(10, "backward", 3000, 6000, shard=0),
    span(10, "compute", 900, 6500),
    span(10, "commit", 7000, 7500),
    span(10, "operation", 0, 8000, "step 0", step=0),
    span(10, "operation", 9000, 11000, "step 1", step=1),
    span(11, "wait", 100, 200, "wait for the next generation"),
    span(11, "operation", 1000, 7000, "step 0", step=0),
    span(11, "operation", 7500, 7800, "step 1, to be done again", step=1),
    span(11, "unfinished", 7900, 9600, "step 1, unfinished", step=1),
]


def test_the_innermost_span_has_the_time():
    found = read(EVENTS)[0]
    assert found.steps == {0: 2, 1: 1}
    assert found.spent[0] == {
        "forward": 2000,
        "wait": 1000,
        "exchange": 200,
        "backward": 3000 - 1200,
        "compute": 5600 - 2000 - 3000,
        "commit": 500,
        "operation": 8000 - 5600 - 500 + 2000,
        "outside": 1000,
    }
    assert sum(found.spent[0].values()) == 11000, "nothing is lost, nothing counted twice"
    assert found.waited[0] == {1: 1000}
    assert found.tags == {"layer": [1, 1000]}


def test_what_is_in_no_committed_step_is_not_of_a_step():
    found = read(EVENTS)[0]
    assert found.spent[1] == {"operation": 6000}
    assert found.waited.get(1, {}) == {}
    assert found.again == {1: 1}
    assert found.lost == [(1, 9600, 1)]


def test_tables_say_it_in_milliseconds_of_a_step():
    lines = render(read(EVENTS), {}).splitlines()
    assert lines[0] == "2 steps, 2 workers; milliseconds of a step"
    rows = {line.rpartition("  ")[0].rstrip()[:20].strip(): line.split()[-2:] for line in lines if "  " in line}
    assert rows["wait"] == ["0.50", "0.00"]
    assert any(line.split() == ["a", "step,", "all", "in", "all", "5.00", "6.00"] for line in lines)
    assert any(line.split() == ["layer", "0.33", "0.50", "100", "%"] for line in lines)
    assert "worker 1 was lost in step 1, 0.010 s after the beginning" in lines
    assert render(read([]), {}) == "no step was committed while it was traced"


def test_groups_have_tables_of_their_own():
    events = [
        named(0, 10, 2, group=0),
        named(0, 10, 3, group=1),
        named(1, 11, 3, group=1),
        span(10, "operation", 0, 2000, "step 0", 2, step=0),
        span(10, "wait", 1000, 3000, "wait for server 0", 3),
        span(10, "operation", 0, 4000, "step 0", 3, step=0),
        span(11, "wait", 1000, 2000, "wait for worker 0", 3, worker=0),
        span(11, "operation", 0, 4000, "step 0", 3, step=0),
    ]
    found = read(events)
    assert {group: each.steps for group, each in found.items()} == {0: {0: 1}, 1: {0: 1, 1: 1}}
    assert found[1].waited == {0: {"server 0": 2000}, 1: {0: 1000}}, "worker 0 of its own group"
    lines = render(found, {}).splitlines()
    assert lines[0] == "group 0: 1 step, 1 worker; milliseconds of a step"
    second = lines[lines.index("group 1: 1 step, 2 workers; milliseconds of a step") :]
    assert [line.split() for line in second if line.startswith("worker")] == [
        ["worker", "0", "0.00", "0.00", "2.00"],
        ["worker", "1", "1.00", "0.00", "0.00"],
    ]


def test_servers_have_a_table():
    thread = {"ph": "M", "name": "thread_name", "pid": 4, "tid": 1, "args": {"name": "group 0", "server": 0}}
    served = [span(1, "request", at, at + 500, "update", 4) for at in (0, 1000)] + [span(1, "request", 9, 10, "get", 4)]
    events = [thread, named(0, 10, 2, group=0), span(10, "operation", 0, 2000, "step 0", 2, step=0), *served]
    assert requests(events) == {(0, "get"): (1, 1.0), (0, "update"): (2, 1000.0)}
    assert set(read(events)) == {0}, "they are no workers"
    *_, heads, get, update = render(read(events), requests(events)).splitlines()
    assert [line.split() for line in (heads, get, update)] == [
        ["requests", "ms", "each"],
        ["server", "0,", "get", "1", "0.00"],
        ["server", "0,", "update", "2", "0.50"],
    ]
