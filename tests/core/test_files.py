"""Files in directories of others: nothing but regular files is read, and nothing is written through a link."""

import os
import stat

import pytest

from evenstep.core.files import open_regular, read_regular, write_new


def test_a_regular_file_is_read_up_to_a_limit(tmp_path):
    path = tmp_path / "state"
    write_new(path, b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_regular(path, 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "missing", 4)


def test_a_pipe_or_a_directory_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(OSError, match="is not a regular file"):
            open_regular(tmp_path / path)


def test_a_link_is_followed_for_reading_only(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"theirs")
    link.symlink_to(target)
    assert read_regular(link, 99) == b"theirs"
    write_new(link, b"ours")
    assert target.read_bytes() == b"theirs"
    assert not link.is_symlink()
    assert link.read_bytes() == b"ours"


def test_a_pipe_in_the_place_of_a_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / "state")
    write_new(tmp_path / "state", b"ours")
    assert stat.S_ISREG(os.stat(tmp_path / "state").st_mode)
