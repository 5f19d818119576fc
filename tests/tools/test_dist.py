"""An sdist says nothing of when and by whom it was made; the core is for every Python."""

import io
import os
import sys
import tarfile
from pathlib import Path

import pytest

from evenstep.native import arithmetic, core

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import dist

    return dist


def archive(path, names, mtime, uid):
    with tarfile.open(path, "w:gz") as made:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.uid, entry.uname = 4, mtime, uid, f"user {uid}"
            made.addfile(entry, io.BytesIO(name[-1:].encode() * 4))


def test_two_sdists_of_the_same_files_are_the_same_bytes(dist, tmp_path):
    first, second = tmp_path / "1" / "x.tar.gz", tmp_path / "2" / "x.tar.gz"
    for path, names, mtime, uid in ((first, ["x/a", "x/b"], 1, 0), (second, ["x/b", "x/a"], 2, 7)):
        path.parent.mkdir()
        archive(path, names, mtime, uid)
        dist.level(path, 1_800_000_000)
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(second) as made:
        assert [(each.name, each.mtime) for each in made] == [("x/a", 1_800_000_000), ("x/b", 1_800_000_000)]
        assert made.extractfile("x/a").read() == b"aaaa"


def test_the_date_of_a_package_is_that_of_the_commit_unless_it_is_given(dist, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234567890")
    assert dist.commit_time() == 1234567890


@pytest.mark.parametrize("module", [core, arithmetic])
def test_the_core_is_built_for_the_stable_abi(module):
    assert Path(module.__file__).name.endswith(".abi3.so"), f"{sys.executable} setup.py -q build_ext --inplace"
    beside = [name for name in os.listdir(Path(module.__file__).parent) if ".cpython-" in name and name.endswith(".so")]
    assert not beside, "one Python would load these instead"
