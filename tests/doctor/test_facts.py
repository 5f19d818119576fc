"""The doctor reads what is there, and says None of what is not."""

import os

from evenstep.doctor.facts import read_facts


def test_limits_and_sizes_are_read(tmp_path):
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("2\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    os.symlink("1", tmp_path / "self")
    found = read_facts(("a GPU",), tmp_path, tmp_path)
    assert (found.ptrace_scope, found.memory_bytes, found.quota_cores) == (2, 2 << 20, 1.5)
    assert not found.sees_itself
    assert found.gpus == ("a GPU",)
    assert found.usable_cores == len(os.sched_getaffinity(0))
    assert found.has_memfd
    assert found.has_pidfd


def test_what_is_not_there_is_none(tmp_path):
    (tmp_path / "cpu.max").write_text("max 100000\n")
    found = read_facts((), tmp_path, tmp_path)
    assert (found.ptrace_scope, found.memory_bytes, found.quota_cores) == (None, None, None)
