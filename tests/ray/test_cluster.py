"""Runs on a Ray cluster: the result of `python train.py` on any number of nodes, also when they are lost and appear."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import evenstep
import forker
import guests
import processes
from evenstep.cli.trace import events_of
from evenstep.picture import timeline
from guests import training

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def left(cpus=2.0):
    """Whether nothing of ours is left in the cluster; waits for it."""
    import ray

    def found():
        groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
        return len(groups), ray.available_resources().get("CPU")

    assert processes.until(lambda: found() == (0, cpus), 60.0), found()


def run_it(cluster, directory):
    import evenstep.ray
    from evenstep.ray import cluster as ours

    seen, placed, place = [], [], ours._Guest._place
    ours._Guest._place = lambda guest, *where: placed.append(where) or place(guest, *where)
    try:
        found = guests.run_and_look(
            lambda: evenstep.ray.run(training, directory, workers=(1, 8), quiet=True, on_progress=seen.append),
            directory,
            (2, None),
        )
    finally:
        ours._Guest._place = place
    left()
    return found, seen[-1].epoch, len(placed)


def test_workers_on_nodes_end_on_the_fingerprint_of_one_process(ray, fingerprint, tmp_path):
    found, epoch, num_agents = ray.call(run_it, str(tmp_path))
    assert found == (fingerprint, 2)
    assert epoch == guests.STEPS // 4 - 1
    assert num_agents == 1, "the head has the workers of its node, and no agent is placed once the run is over"


def run_elsewhere(cluster, directory):
    """Another job has the driver's node."""
    import ray

    import evenstep.ray

    home = ray.get_runtime_context().get_node_id()
    group = ray.util.placement_group([{"CPU": 1}], bundle_label_selector=[{"ray.io/node-id": home}])
    assert group.wait(60)
    seen = []
    try:
        evenstep.ray.run(guests.put_script(directory), f"{directory}/out", workers=1, on_progress=seen.append)
    finally:
        ray.util.remove_placement_group(group)
    left()
    return Path(directory, "out").read_text(), bool(seen)


def test_if_the_driver_has_no_room_the_head_only_keeps_the_state(ray, tmp_path):
    assert ray.call(run_elsewhere, str(tmp_path)) == (guests.fingerprint_of_script(tmp_path), True)


def lose_and_find(cluster, directory):
    import ray

    import evenstep.ray

    extra = cluster.add_node(**NODE)
    found = guests.run_and_look(
        lambda: evenstep.ray.run(training, directory, workers=(3, 4), quiet=True),
        directory,
        (3, lambda: cluster.remove_node(extra, allow_graceful=False)),
        (2, lambda: cluster.add_node(**NODE)),
        (3, lambda: guests.kill("ray::AgentActor")),
        (2, None),
        (3, None),
    )
    left(3.0)
    cluster.remove_node(cluster.list_all_nodes()[-1])
    dead = lambda: [each["NodeID"] for each in ray.nodes() if not each["Alive"]]  # noqa: E731
    assert processes.until(lambda: extra.node_id in dead(), 100.0), "until then Ray would send it tasks"
    return found


def test_lost_nodes_and_actors_cost_a_step_and_nodes_that_appear_are_used(ray, fingerprint, tmp_path):
    assert ray.call(lose_and_find, str(tmp_path)) == (fingerprint, 3)


def interrupt(cluster, directory):
    import evenstep.ray

    found = guests.interrupt(lambda: evenstep.ray.run(training, directory, workers=1, quiet=True), directory)
    left()
    return found


def test_an_interrupt_stops_after_the_step_with_a_checkpoint(ray, tmp_path):
    assert ray.call(interrupt, str(tmp_path)) == (["interrupted"], True)


def mistakes(cluster):
    import evenstep.ray

    room = {"room": lambda: evenstep.ray.run(guests.fails, workers=9, start_timeout_s=0.1)}
    gpu = {"gpu": lambda: evenstep.ray.run(guests.fails, workers=1, gpus_per_worker=1, start_timeout_s=0.1)}
    late = {"late": lambda: evenstep.ray.run(guests.fails, workers=1, start_timeout_s=0.001)}
    said = guests.said_by(**guests.common_mistakes(evenstep.ray.run))
    left()  # or what the one that failed had is not free yet
    less = {"less": lambda: evenstep.ray.run(guests.fails, workers=1, cpus_per_worker=-1)}
    kind = {"kind": lambda: evenstep.ray.run(guests.fails, workers=1, resources_per_worker={"CPU": 1})}
    own = {"own": lambda: evenstep.ray.run(guests.fails, resources_per_worker={"tape": 1}, start_timeout_s=0.1)}
    elsewhere = {"elsewhere": lambda: evenstep.ray.run(guests.fails, workers=1, address="192.0.2.1:6379")}
    said |= guests.said_by(**room, **gpu, **late, **less, **kind, **own, **elsewhere)
    left()
    with everything_is_taken():
        said |= guests.said_by(busy=lambda: evenstep.ray.run(guests.fails, workers=1, start_timeout_s=0.5))
    left()
    return said


@contextmanager
def everything_is_taken():
    """Another job has both nodes."""
    import ray

    group = ray.util.placement_group([{"CPU": 1}] * 2)
    assert group.wait(60)
    yield
    ray.util.remove_placement_group(group)


def test_mistakes_get_a_sentence_and_errors_of_the_script_their_traceback(ray):
    said = ray.call(mistakes)
    guests.check_mistakes(said)
    assert said["room"].startswith("ConfigError: there is room for 2 workers, expected at least 9: each takes 1 CPU")
    assert said["less"] == "ConfigError: cpus_per_worker=-1, expected a number of at least 0"
    assert said["elsewhere"].startswith("ConfigError: address='192.0.2.1:6379', but Ray is connected already, to ")
    assert said["kind"].startswith("ConfigError: resources_per_worker has 'CPU'; expected names that `ray start")
    assert "there is room for 0 workers, expected at least 2: each takes 1 CPU and 1 tape, and " in said["own"]
    busy = r"SilenceError: there is room for 0 workers, expected at least 1: each takes 1 CPU, and \d nodes have free: "
    late = r"others did not leave the rest within 0\.5 s \(start_timeout_s\)"
    assert re.fullmatch(rf"{busy}(0 CPU and 0 GPU(, )?)+; {late}", said["busy"]), said["busy"]
    assert said["late"].startswith("SilenceError: the first workers did not start within 0.001 s: 1 were expected")
    assert said["gpu"].startswith(
        "ConfigError: there is room for 0 workers, expected at least 1 on one node, since GPUs of several nodes are "
        "not used together: each takes 1 CPU and 1 GPU, and "
    )


def blocks(cluster, directory):
    import hashlib

    import ray

    import evenstep.ray

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"x": [float(n), 1.0], "y": n % 3} for n in range(200)]
    found = []
    for number in (1, 5):
        place = Path(directory, str(number))
        place.mkdir()
        assert evenstep.ray.write(ray.data.from_items(rows, override_num_blocks=number), place) == 200
        found.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in place.iterdir()})
    found.append(files_of_wide_rows(ray.data.from_items(rows), Path(directory, "wide")))
    found.append(files_of_wide_rows(ray.data.from_items([{"t": "abc" * 100}] * 20), Path(directory, "text")))
    nothing, empty = ray.data.from_items([{"x": 1.0}, {"x": None}]), Path(directory, "empty")
    empty.mkdir()
    said = guests.said_by(
        missing=lambda: evenstep.ray.write(nothing, empty, ["z"]),
        letters=lambda: evenstep.ray.write(nothing, empty, "x"),
        null=lambda: evenstep.ray.write(nothing, empty),
        twice=lambda: evenstep.ray.write(nothing, place),
        ragged=lambda: evenstep.ray.write(ray.data.from_items([{"x": [1]}, {"x": [1, 2]}]), empty),
    )
    images = np.arange(6 * 2 * 3 * 4, dtype=np.uint8).reshape(6, 2, 3, 4)
    evenstep.ray.write(ray.data.from_numpy(images), empty)
    return found, said, images


def files_of_wide_rows(dataset, place):
    """How many files there are if a file may have no more than 1,000 bytes."""
    from unittest import mock

    import evenstep.ray

    place.mkdir()
    with mock.patch("evenstep.data.content._BYTES_OF_A_FILE", 1000):
        evenstep.ray.write(dataset, place)
    return max(int(file.stem.removeprefix("part-")) for file in place.iterdir())


def test_the_same_rows_in_other_blocks_are_the_same_bytes(ray, tmp_path):
    (one, five, wide, text), said, images = ray.call(blocks, str(tmp_path))
    assert one == five
    assert wide == 7, "200 rows of 24 bytes are 8 files"
    assert text < 8, "6,000 bytes, which are all one row"
    read = evenstep.data.parquet(tmp_path / "empty")
    assert sorted(read[n]["data"].numpy().tolist() for n in range(6)) == images.tolist(), "arrays keep their shape"
    assert re.fullmatch(
        "ConfigError: column 'x' of the data set has [12] numbers in row 0 but [12] in row 1; expected as many in "
        "each: pad them",
        said["ragged"],
    )
    assert said["missing"] == "ConfigError: there is no column 'z' in the data set, which has x"
    assert said["letters"] == "ConfigError: columns='x', expected a list of names: columns=['x']"
    assert said["twice"] == (
        f"ConfigError: {tmp_path}/5 has Parquet files already (part-00000.parquet), whose rows would be read with "
        "these; expected an empty directory"
    )
    assert said["null"].startswith("ConfigError: column 'x' has only nulls, at least in some part of the data; fill it")


def command(cluster, directory):
    """`evenstep run --on ray`, of a script with a module beside it."""
    where = {**os.environ, "RAY_ADDRESS": cluster.address}
    script, out = guests.put_script(directory), f"{directory}/out"
    figures = ["--trace", "trace.json", "--log-json", "steps.jsonl", "--tensorboard", "board", "--page", "0"]
    words = [sys.executable, "-m", "evenstep", "run", "--on", "ray", "-n", "2", *figures, str(script), out]
    with forker.closed():
        done = subprocess.run(words, env=where, cwd=directory, capture_output=True, text=True, check=False, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_runs_a_script_with_what_lies_beside_it(ray, tmp_path):
    code, out, err = ray.call(command, str(tmp_path))
    assert code == 0, err
    assert "leaked" not in err, "as libraries say at the end of a process whose objects are kept from them"
    assert f"on 2 {tmp_path}/out" in out
    assert (tmp_path / "out").read_text() == guests.fingerprint_of_script(tmp_path)
    assert f"fingerprint {(tmp_path / 'out').read_text()}" in out
    found = timeline.read(events := events_of(tmp_path / "trace.json"))[0]
    assert found.steps[0] == found.steps[1] > 0, "every step, of the head's worker and of the other node's"
    assert all(found.spent[worker]["forward"] > 0.0 for worker in (0, 1)), "both compute"
    machines = [(e["pid"], e["args"]["name"][:9]) for e in events if e["name"] == "process_name"]
    assert sorted(machines) == [(1, "machine 0"), (2, "machine 1")]
    assert any("joined with 1" in e["name"] for e in events if e["ph"] == "i"), "what the head said"
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, found.steps[0] + 1)), "where the command was typed"
    assert len(list((tmp_path / "board").iterdir())) == 1
    assert re.search(r"page http://\S+, its buttons need the token", err), err


def test_options_of_one_machine_are_refused():
    from workers import cli_run

    done = cli_run("run", "--on", "spark", "-n", "2", __file__)
    assert (done.code, done.stderr.strip()) == (2, "evenstep: --on spark, expected ray, or ray://HOST:PORT")
    given = ("--weights 1,1", "--groups 2", "--listen 127.0.0.1:0", "--grace 3", "--staleness 0")
    for option, value in map(str.split, given):
        done = cli_run("run", "--on", "ray", option, value, "-n", "2", __file__)
        assert done.code == 2
        assert f"{option} applies to one machine and has no meaning with --on ray; leave it out" in done.stderr
    done = cli_run("run", "--on", "ray", __file__)
    assert "-n None with --on ray, expected a number of workers" in done.stderr


def test_no_cluster_is_one_sentence():
    pytest.importorskip("ray", reason="Ray is not there: pip install 'evenstep[ray]'")
    from workers import run_outcomes

    def body(worker):
        import warnings

        import evenstep.ray

        warnings.simplefilter("default")  # those of Ray are no errors
        evenstep.ray.run(training, address="127.0.0.1:1")

    (outcome,) = run_outcomes(1, body)
    assert outcome.kind == "ConfigError"
    assert "no Ray cluster can be reached at 127.0.0.1:1" in outcome.text


def test_a_node_with_another_torch_ends_the_start_in_one_sentence():
    pytest.importorskip("ray", reason="Ray is not there: pip install 'evenstep[ray]'")
    from types import SimpleNamespace

    from workers import run_outcomes

    said = "the head refuses this machine: torch is 0.1 there, but 2 on the head"

    def body(worker):
        import warnings

        warnings.simplefilter("default")  # those of Ray are no errors
        from evenstep.agents.view import RunView
        from evenstep.ray import cluster

        guest = cluster._Guest(None, 1, 1, {"CPU": 1, "GPU": 0}, 60.0, RunView(None, quiet=True))
        agent = SimpleNamespace(node="ab" * 14, count=1, over=None, remove=lambda: None)
        guest._placed, guest._begun = [agent], lambda: False
        cluster.ray.get = lambda reference: (True, said)  # as its actor returns it
        guest._ended(agent)

    (outcome,) = run_outcomes(1, body)
    assert outcome.kind == "ConfigError"
    assert f"node abababab: {said}" in outcome.text


def test_room_for_the_head_that_another_job_has_taken_meanwhile_is_looked_for_again():
    pytest.importorskip("ray", reason="Ray is not there: pip install 'evenstep[ray]'")
    from types import SimpleNamespace
    from unittest import mock

    from workers import run_workers

    def body(worker):
        import warnings

        warnings.simplefilter("default")  # those of Ray are no errors
        from evenstep.agents.view import RunView
        from evenstep.core.errors import SilenceError
        from evenstep.ray import cluster

        def reserve(answers, timeout_s):
            """Of two workers, one on the driver's node; what is found, and how many reservations were given up."""
            guest = cluster._Guest(None, 2, 2, {"CPU": 1, "GPU": 0}, timeout_s, RunView(None, quiet=True))
            guest._find_room = lambda: {"home": 1, "other": 1}
            guest._reserve = lambda node, count: (SimpleNamespace(wait=lambda _: answers.pop(0)), {"CPU": count})
            with (
                mock.patch.object(cluster, "node_of_driver", return_value="home"),
                mock.patch.object(cluster, "remove_placement_group") as remove,
            ):
                try:
                    return guest._reserve_home(), guest._on_head, remove.call_count
                except SilenceError as error:
                    return str(error), guest._group, remove.call_count

        return reserve([False, False, True], 60.0), reserve([False], 0.0)

    ((found, late),) = run_workers(1, body)
    assert found == (({"other": 1}, "home", {"CPU": 1}), 1, 2)
    assert late[0].startswith("the room that was found on node home went to others each time, for 0 s")
    assert late[1:] == (None, 1)


def test_the_first_step_waits_for_those_who_may_come_even_if_the_head_hears_it_late():
    pytest.importorskip("ray", reason="Ray is not there: pip install 'evenstep[ray]'")
    from types import SimpleNamespace

    from workers import run_workers

    def body(worker):
        import warnings

        warnings.simplefilter("default")  # those of Ray are no errors
        from evenstep.agents.view import RunView
        from evenstep.ray import cluster

        guest = cluster._Guest(None, 1, 3, {"CPU": 1, "GPU": 0}, 60.0, RunView(None, quiet=True))
        told, begun = [], []
        guest._head = SimpleNamespace(wait_for=SimpleNamespace(remote=told.append))
        guest._begun = lambda: bool(begun)
        guest._placed = [SimpleNamespace(count=1) for _ in range(3)]
        for _ in range(4):
            guest._check_begun()
            del guest._placed[:1]
        begun.append(True)
        guest._check_begun()
        return told

    assert run_workers(1, body) == [[3, 2, 1, 1]], "a node may be lost before the head has started"
