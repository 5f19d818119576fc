"""The kind of processor is what libraries choose their kernels by; what it is called is not."""

import platform
import subprocess

from evenstep.arithmetic.processor import read_processor

CPUINFO = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu avx2 fma avx512f amx_tile

processor\t: 1
model name\t: another
"""


def test_the_processor_is_that_of_the_first_core(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    found = read_processor(path)
    assert str(found) == "Intel(R) Xeon(R) Processor (GenuineIntel, family 6, model 207, avx2 fma avx512f amx_tile)"


def test_a_system_that_does_not_tell_its_processor_is_no_error(tmp_path):
    found = read_processor(tmp_path / "missing")
    assert found.features == ()
    assert "no AVX2" in found.kind


def test_processors_that_only_have_other_names_are_of_one_kind(tmp_path):
    kinds = set()
    for name in ("Intel(R) Xeon(R) Processor", "Intel(R) Xeon(R) Platinum"):
        (tmp_path / "cpuinfo").write_text(CPUINFO.replace("Intel(R) Xeon(R) Processor", name))
        kinds.add(read_processor(tmp_path / "cpuinfo").kind)
    (tmp_path / "cpuinfo").write_text(CPUINFO.replace("207", "143"))
    assert len(kinds) == 1
    assert read_processor(tmp_path / "cpuinfo").kind not in kinds


def test_no_process_is_started_to_ask(monkeypatch):
    monkeypatch.setattr(platform, "_uname_cache", None)
    monkeypatch.delattr(subprocess, "Popen")
    assert read_processor().name
