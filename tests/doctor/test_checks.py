"""The doctor's findings: a healthy machine gives none, and each ailment gives one, with its remedy."""

from dataclasses import replace

import pytest

from evenstep.arithmetic.processor import Processor
from evenstep.doctor.checks import Software, judge, judge_software
from evenstep.doctor.facts import Facts

HEALTHY = Facts(
    kernel="6.1.0-18-amd64",
    has_memfd=True,
    has_pidfd=True,
    sees_itself=True,
    ptrace_scope=1,
    shared_bytes=1 << 30,
    memory_bytes=8 << 30,
    cores=8,
    usable_cores=8,
    quota_cores=None,
    load=0.5,
    open_files=4096,
    file_bytes=None,
    address_bytes=None,
    gpus=("NVIDIA H200",),
    mps=True,
)
SOFTWARE = Software("2.13.0+cpu", "2.13.0", "2024.2", "3.12.0", "AVX2", "glibc 2.36", "Linux")
PROCESSOR = Processor("AuthenticAMD", "AMD EPYC", "family 25, model 17", ("avx2", "fma"))


def ailments(facts: Facts) -> dict[str, tuple[str, str]]:
    return {finding.name: (finding.state, finding.remedy) for finding in judge(facts) if finding.state != "ok"}


def test_a_healthy_machine_has_no_ailments_and_shows_what_was_looked_at():
    assert ailments(HEALTHY) == {}
    names = [finding.name for finding in judge(HEALTHY)]
    assert names == [
        *("kernel", "system calls", "namespaces", "access", "shared memory", "memory"),
        *("open files", "file size", "address space", "cores", "load", "GPU", "MPS"),
    ]


@pytest.mark.parametrize(
    ("changes", "name", "state", "remedy"),
    [
        ({"kernel": "4.19.0"}, "kernel", "bad", "Linux 5.3 or later"),
        ({"has_pidfd": False}, "system calls", "bad", "pidfd_open"),
        ({"sees_itself": False}, "namespaces", "bad", "mount /proc"),
        ({"ptrace_scope": 2}, "access", "note", "ptrace_scope=1"),
        ({"shared_bytes": 64 << 20}, "shared memory", "note", "--shm-size 2g"),
        ({"shared_bytes": None}, "shared memory", "note", "loaders=0"),
        ({"open_files": 256}, "open files", "note", "ulimit -n 4096"),
        ({"file_bytes": 1 << 30}, "file size", "bad", "ulimit -f unlimited"),
        ({"address_bytes": 1 << 34}, "address space", "bad", "ulimit -v unlimited"),
        ({"quota_cores": 2.5}, "cores", "note", "evenstep run -n 2"),
        ({"load": 9.0}, "load", "note", "noisy"),
        ({"mps": False}, "MPS", "note", "nvidia-cuda-mps-control -d"),
    ],
)
def test_every_ailment_is_found_and_has_a_remedy(changes, name, state, remedy):
    found = ailments(replace(HEALTHY, **changes))
    assert list(found) == [name]
    assert found[name][0] == state
    assert remedy in found[name][1]


def test_without_a_gpu_nobody_speaks_of_sharing_it():
    assert [finding.name for finding in judge(replace(HEALTHY, gpus=(), mps=False))][-1] == "GPU"


def test_what_forbids_portable_arithmetic_is_said():
    assert [finding.state for finding in judge_software(SOFTWARE, PROCESSOR)] == ["ok", "ok"]
    old = next(judge_software(SOFTWARE, replace(PROCESSOR, features=())))
    assert (old.state, old.found) == ("note", "AMD EPYC (AuthenticAMD, family 25, model 17, no AVX2)")
    assert "AVX2 and FMA" in old.remedy
    build = list(judge_software(replace(SOFTWARE, mkl=None), PROCESSOR))[1]
    assert "install torch from PyPI" in build.remedy
    version = list(judge_software(replace(SOFTWARE, torch="2.14.0"), PROCESSOR))[2]
    assert "pip install torch==2.13.0" in version.remedy
