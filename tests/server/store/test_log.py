"""A log on the disk: whole records only, whatever the disk does; and what harm to it comes to."""

import os

import pytest
import torch

from evenstep.core.errors import CheckpointError
from evenstep.server.store.log import Log, read

FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND


def record(number):
    return {"number": number}, {"x": torch.full((5,), float(number))}


def numbers(path):
    return [found.record[0]["number"] if found.record else None for found in read(path)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log"


@pytest.fixture
def log(path):
    log = Log(os.open(path, FLAGS), sync=True)
    yield log
    log.close()


def test_what_is_written_is_read_back(log, path):
    assert numbers(path) == []
    for number in range(3):
        log.append(record(number))
    found = list(read(path))
    assert [each.number for each in found] == [1, 2, 3]
    assert [float(each.record[1]["x"][4]) for each in found] == [0, 1, 2]
    assert numbers(path.with_name("nothing")) == []


def test_a_disk_that_is_full_in_the_middle_of_a_record_leaves_whole_ones(log, path, monkeypatch):
    writev = os.writev
    log.append(record(0))
    size = path.stat().st_size

    def full(fd, parts):
        if path.stat().st_size > size:
            raise OSError(28, "No space left on device")
        return writev(fd, [b"".join(parts)[:20]])

    monkeypatch.setattr(os, "writev", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            log.append(record(1))
        assert path.stat().st_size == size
    monkeypatch.undo()
    log.append(record(2))
    assert numbers(path) == [0, 2]
    assert not log.in_doubt


def test_a_disk_that_does_not_take_what_it_was_given_is_in_doubt(log, path, monkeypatch):
    log.append(record(0))

    def fails(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(OSError, match="Input/output"):
        log.append(record(1))
    assert log.in_doubt
    assert numbers(path) == [0]


def test_the_last_record_can_be_taken_back(log, path):
    for number in range(3):
        log.append(record(number))
    log.retract()
    log.append(record(7))
    assert numbers(path) == [0, 1, 7]


@pytest.mark.parametrize("harm", ["magic", "length", "content", "cut"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_torn_end_is_told_from_harm_in_the_middle(log, path, harm, which):
    ends = [0]
    for number in range(3):
        log.append(record(number))
        ends.append(path.stat().st_size)
    data = bytearray(path.read_bytes())
    at = ends[which] + {"magic": 0, "length": 9, "content": 40, "cut": 0}[harm]
    data[at] ^= 0x41
    if harm == "cut":
        data = bytearray(path.read_bytes())
        del data[ends[which + 1] - 5 : ends[which + 1]]
    path.write_bytes(data)
    *before, last = read(path)
    assert [each.record[0]["number"] for each in before] == list(range(which))
    assert (last.number, last.offset, last.record, last.is_last) == (which + 1, ends[which], None, which == 2)


def test_only_a_regular_file_is_read(path):
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        list(read(path))
