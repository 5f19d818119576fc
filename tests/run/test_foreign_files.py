"""What others have put into, or done to, the places where checkpoints lie: nothing of theirs is touched or believed."""

import contextlib
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import evenstep
import processes
from evenstep.core.errors import CheckpointError
from evenstep.exchange.journal import Entry
from evenstep.run import checkpoint
from evenstep.run.checkpoints import Checkpoints, Snapshot
from evenstep.run.claim import Claim

IDENTITY = {"shards": 2, "seed": 0, "optimizers": 1}
TENSORS = {"model.weight": torch.arange(4.0)}
FACTS = {
    **IDENTITY,
    "position": {"epoch": 0, "batch": 1},
    "data": [[10, 2]],
    "values": {"optimizer0.step": 3},
    "groups": [{"list": [{"dict": [["lr", 0.1]]}]}],
    "tracked": {"scheduler": {"dict": [[1, {"tuple": [2]}]]}},
}


def save(directory: Path, version: int) -> Path:
    """Write a checkpoint as a run does."""
    snapshot = Snapshot(TENSORS, {**FACTS, "version": version}, Entry("checkpoint").pack())
    Checkpoints(directory, 1, keep=2).write(snapshot, wait=True)
    return directory / f"step-{version:09}"


def found(directory: Path) -> int | None:
    """From which step a run would go on."""
    ledger = SimpleNamespace(done=0, journal=None)
    resumed = Checkpoints(directory, 1, keep=2).find(IDENTITY, TENSORS, ledger)
    return resumed and resumed.facts["version"]


def tree(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory."""
    paths = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in paths}


# ---- what was altered ----


def resealed(facts: dict) -> str:
    """As somebody would write it who knows how the checksum is made."""
    rest = {key: value for key, value in facts.items() if key != "checksum"}
    return json.dumps({**rest, "checksum": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()})


FIELDS = [*FACTS, "version", "fingerprint", "state", "sha256", "journal", "journal_sha256", "written_s", "format"]
VALUES = ["x", -1, 1.5, True, None, [], {}, [[]], [{}], {"x": 1}, ["x"], [["dict", 3]], {"dict": 5}, "../x", "0" * 64]
WRONG = {
    "shards": "2",
    "seed": 0.5,
    "optimizers": -1,
    "position": {"epoch": 1},
    "data": [[10]],
    "values": [],
    "groups": [{"list": 3}],
    "tracked": {"scheduler": {"dict": [[1]]}},
    "version": True,
    "fingerprint": "0" * 64,
    "state": "../state-1-00000000.safetensors",
    "sha256": "0" * 64,
    "journal": "/dev/zero",
    "journal_sha256": "0" * 64,
    "written_s": "now",
    "format": 3,
}


@pytest.fixture
def two(tmp_path):
    """The facts of a checkpoint that has one before it, and where they are."""
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "checkpoint.json"
    assert found(tmp_path) == 2
    return json.loads(path.read_text()), path


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_was_altered_is_one_sentence_and_the_checkpoint_before_is_used(two, tmp_path, field, capsys):
    facts, path = two
    without = {key: value for key, value in facts.items() if key != field}
    for altered in [without, *({**facts, field: value} for value in VALUES)]:
        path.write_text(json.dumps(altered))
        capsys.readouterr()
        assert found(tmp_path) == 1, altered[field]
        (passed, _) = capsys.readouterr().err.splitlines()
        assert passed.startswith(f"evenstep: passed over: {path} "), passed


@pytest.mark.parametrize("field", WRONG)
def test_so_is_one_whose_checksum_was_made_to_fit(two, tmp_path, field, capsys):
    facts, path = two
    path.write_text(resealed({**facts, field: WRONG[field]}))
    assert found(tmp_path) == 1
    assert f"passed over: {path.parent}" in capsys.readouterr().err
    for value in VALUES:  # some of these could be of another run: then that is said
        path.write_text(resealed({**facts, field: value}))
        with contextlib.suppress(CheckpointError):
            assert found(tmp_path) in (1, 2)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


THINGS = {
    "a pipe": make_pipe,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": make_loop,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "nothing": lambda path: None,
    "an empty file": Path.touch,
    "noise": lambda path: path.write_bytes(bytes(range(256))),
    "deep nesting": lambda path: path.write_text("[" * 100_000),
    "deep nesting that ends": lambda path: path.write_text('{"format":' * 50_000 + "2" + "}" * 50_000),
    "a number without end": lambda path: path.write_text("1" * 10_000),
    "another JSON": lambda path: path.write_text('{"epochs": 3}'),
}


@pytest.mark.parametrize("which", ["checkpoint.json", "*.safetensors", "*.journal"])
@pytest.mark.parametrize("thing", THINGS)
def test_only_regular_files_are_read_and_none_without_an_end(tmp_path, thing, which):
    save(tmp_path, 1)
    (path,) = save(tmp_path, 2).glob(which)
    path.unlink()
    THINGS[thing](path)
    assert found(tmp_path) == 1
    save(tmp_path, 3)  # it is no obstacle for what follows
    assert found(tmp_path) == 3


@pytest.mark.timeout(20)
@pytest.mark.parametrize("which", ["state", "journal", "journal.new", "partial", "checkpoint.json.new"])
@pytest.mark.parametrize("thing", ["a pipe", "a link to theirs"])
def test_the_same_step_is_written_again_over_whatever_lies_in_its_place(tmp_path, which, thing):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    there = save(tmp_path, 2)
    (state,) = there.glob("*.safetensors")
    suffix = {"state": ".safetensors"}.get(which, f".{which}")
    path = there / which if which.startswith("checkpoint") else state.with_suffix(suffix)
    path.unlink(missing_ok=True)
    make_pipe(path) if thing == "a pipe" else path.symlink_to(theirs)
    save(tmp_path, 2)
    assert found(tmp_path) == 2
    assert theirs.read_text() == "theirs"


def test_a_whole_checkpoint_stays_whole_while_the_same_step_is_written_again(tmp_path, monkeypatch):
    there = save(tmp_path, 2)
    before = tree(there)

    checksums = iter(["0" * 64])  # of the state; then the disk fails
    monkeypatch.setattr(checkpoint, "_checksum", lambda path: next(checksums, None) or os.stat("/nowhere"))
    with pytest.raises(CheckpointError, match="/nowhere"):
        checkpoint.write(there, TENSORS, {**FACTS, "version": 2}, b"another journal")
    assert tree(there) == before


def test_a_huge_file_is_not_read(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "checkpoint.json"
    make_endless(path)
    begun = time.monotonic()
    assert found(tmp_path) == 1
    assert time.monotonic() - begun < 10


# ---- what belongs to others ----


def test_nothing_of_others_is_removed(tmp_path):
    others = {
        "step-best/weights.bin": b"theirs",
        "step-000000001/notes.txt": b"theirs",
        "step-000000002/checkpoint.json": b'{"epochs": 3}',
        "step-000000002/state-2-00000000.safetensors": b"theirs",
        "step-3/x": b"theirs",
        "step-000000004": b"a file",
        "elsewhere/x": b"theirs",
        "state-of-the-art.txt": b"theirs",
    }
    for name, data in others.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "step-000000005").symlink_to("elsewhere")
    (tmp_path / "step-000000006").mkdir()
    for version in range(10, 16):
        path = save(tmp_path, version)
        (path / "my notes.txt").write_text("theirs")
    assert found(tmp_path) == 15
    left = tree(tmp_path)
    assert {name: left.get(name) for name in others} == others
    assert (tmp_path / "step-000000005").is_symlink()
    assert (tmp_path / "step-000000006").is_dir()
    assert {p.parent.name for p in tmp_path.glob("step-*/checkpoint.json")} >= {"step-000000014", "step-000000015"}
    for version in range(10, 14):
        assert [p.name for p in (tmp_path / f"step-{version:09}").iterdir()] == ["my notes.txt"], "ours is gone"


@pytest.mark.parametrize("version", [2, 4, 5])
def test_a_checkpoint_is_not_written_over_something_else(tmp_path, version, capsys):
    (tmp_path / "step-000000002").mkdir()
    (tmp_path / "step-000000002" / "checkpoint.json").write_text('{"epochs": 3}')
    (tmp_path / "step-000000004").write_text("a file")
    (tmp_path / "step-000000005").mkdir()
    make_pipe(tmp_path / "step-000000005" / "checkpoint.json")
    before = sorted(tmp_path.rglob("*"))
    save(tmp_path, version)
    assert "CHECKPOINT FAILED" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_saving_by_hand_removes_only_its_own_files(tmp_path):
    theirs = {"state-of-the-art.txt": b"a", "state-1-abcdef01.safetensors": b"b", "x/state-2": b"c"}
    for name, data in theirs.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for version in (1, 2, 3):
        checkpoint.write(tmp_path, TENSORS, {**FACTS, "version": version})
    left = tree(tmp_path)
    assert {name: left.get(name) for name in theirs} == theirs
    assert len(left) == len(theirs) + 3, "the folder, checkpoint.json, and its state"
    assert checkpoint.read(tmp_path, tensors=True)[0]["version"] == 3


def test_a_json_file_of_somebody_else_is_not_replaced(tmp_path):
    (tmp_path / "checkpoint.json").write_text('{"epochs": 3}')
    with pytest.raises(
        CheckpointError, match=r"checkpoint.json is not a checkpoint .*it is not replaced: save elsewhere"
    ):
        checkpoint.write(tmp_path, TENSORS, {**FACTS, "version": 1})
    assert tree(tmp_path) == {"checkpoint.json": b'{"epochs": 3}'}


# ---- what was not finished ----


def begin_and_stop(directory: Path, number: int) -> int:
    """Let a process be killed, or stopped, in the middle of writing; return its id."""
    pid = os.fork()
    if pid == 0:
        try:
            checkpoint.points.reach = lambda _: os.kill(os.getpid(), number)
            save(directory, 1)
        finally:
            os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    return pid


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    begin_and_stop(tmp_path, signal.SIGKILL)
    assert list((tmp_path / "step-000000001").glob("*.safetensors"))
    assert found(tmp_path) is None
    save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]


def test_a_writer_that_is_killed_at_any_moment_leaves_nothing_for_ever(tmp_path, monkeypatch):
    """After each thing that it does to a file in turn: while it writes, and while it removes what is old."""
    monkeypatch.setattr(checkpoint, "_BARE_S", -1.0)
    monkeypatch.setattr(checkpoint, "sync", lambda _: None)  # the machine does not die
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        pid = os.fork()
        if pid == 0:
            try:
                die_after(moment)
                for version in (1, 2, 3):
                    save(folder, version)
            finally:
                os._exit(0)
        was_killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        save(folder, 5)
        save(folder, 6)
        left = {path.name: len(list(path.iterdir())) for path in folder.iterdir()}
        left = {name: num_files for name, num_files in left.items() if num_files}  # an empty one could be anybody's
        assert left == {"step-000000005": 3, "step-000000006": 3}, (moment, tree(folder))
        if not was_killed:
            return
    raise AssertionError("it never came to its end")


def die_after(moment):
    """Be killed after so many changes to the file system."""
    left = iter(range(moment, 0, -1))

    def counted(function):
        def call(*args, **options):
            result = function(*args, **options)
            if next(left, 0) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for owner, name in [(os, "replace"), (os, "unlink"), (Path, "unlink"), (Path, "write_bytes"), (Path, "rmdir")]:
        setattr(owner, name, counted(getattr(owner, name)))
    checkpoint.save_file = counted(checkpoint.save_file)


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    pid = begin_and_stop(tmp_path, signal.SIGSTOP)
    try:
        save(tmp_path, 2)
        assert list((tmp_path / "step-000000001").glob("*.safetensors"))
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, 0)
        assert found(tmp_path) == 1, "it was written last"
    finally:
        processes.kill_tree(pid)


def test_a_write_that_fails_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    checkpoint.write(tmp_path, TENSORS, {**FACTS, "version": 1})
    before = tree(tmp_path)

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.points, "reach", fails)  # its state is written already
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.write(tmp_path, TENSORS, {**FACTS, "version": 2})
    assert tree(tmp_path) == before


# ---- who writes there ----


def hold(directory: Path, run: str) -> int:
    """Let another process have the directory; return its id."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            Claim(directory, run).take()
            os.write(writing, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    return pid


def test_a_directory_is_for_one_run_until_its_last_worker_has_ended(tmp_path):
    workers = [hold(tmp_path, "first") for _ in range(2)]
    try:
        for pid in workers:
            with pytest.raises(CheckpointError, match=rf"is taken: the run of process {workers[0]} on "):
                Claim(tmp_path, "second").take()
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie, and its number its own
        for pid in workers:
            os.waitpid(pid, 0)
        claim = Claim(tmp_path, "second")
        claim.take()
        claim.release()
    finally:
        for pid in workers:
            processes.kill_tree(pid)


def test_a_run_that_has_ended_lets_the_next_one_have_the_directory(tmp_path):
    for run in ("first", "second", "first"):
        claim = Claim(tmp_path, run)
        claim.take()
        claim.release()


@pytest.mark.parametrize("words", [b"", b"theirs", b"[]", b'{"run": 3}'])
def test_a_lock_of_somebody_else_is_waited_for_and_then_said(tmp_path, words, monkeypatch):
    import fcntl

    monkeypatch.setattr("evenstep.run.claim._PATIENCE_S", 0.1)
    path = tmp_path / "evenstep.lock"
    path.write_bytes(words)
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(CheckpointError, match="is taken"):
            Claim(tmp_path, "mine").take()
    assert path.read_bytes() == words


@pytest.mark.parametrize("thing", ["a pipe", "a directory", "a link to itself"])
def test_a_directory_that_cannot_be_locked_is_said_and_used(tmp_path, thing, capsys):
    THINGS[thing](tmp_path / "evenstep.lock")
    claim = Claim(tmp_path, "mine")
    claim.take()
    claim.release()
    assert "cannot be locked" in capsys.readouterr().err


# ---- the last step ----


@pytest.mark.parametrize("every", [1, 2, "0.001s"])
def test_the_checkpoint_of_the_last_step_is_written_however_slow_the_disk_is(tmp_path, monkeypatch, every):
    really = checkpoint.save_file

    def slowly(*args):
        time.sleep(0.3)
        really(*args)

    monkeypatch.setattr(checkpoint, "save_file", slowly)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    with evenstep.Run(shards=2, quiet=True) as run:
        model = nn.Linear(4, 2)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        run.checkpoint(tmp_path, every=every)
        for batch in run.batches(data, batch_size=4):
            run.step(batch, lambda part: model(part[0]).square().mean())
        fingerprint = run.fingerprint()
    facts = [json.loads(path.read_text()) for path in tmp_path.glob("step-*/checkpoint.json")]
    last = max(facts, key=lambda each: each["version"])
    assert last["version"] == 6
    assert last["fingerprint"] == fingerprint
