"""What the facts about a machine mean for a run: each finding with its remedy. Pure: facts in, findings out."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from evenstep.arithmetic.processor import Processor
from evenstep.doctor.facts import Facts

__all__ = ["Finding", "Software", "judge", "judge_software"]

_MIB = 1 << 20
_SHARED_BYTES, _OPEN_FILES = 256 * _MIB, 1024


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        name: What was checked.
        state: "ok", "note" (something is slower or not possible here) or "bad" (runs will fail).
        found: What was found.
        remedy: What to do, unless it is ok.
    """

    name: str
    state: Literal["ok", "note", "bad"]
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Software:
    """The libraries that compute.

    Attributes:
        torch: The version of torch.
        golden: The version that the golden table belongs to.
        mkl: The version of MKL in it, if any.
        onednn: The version of oneDNN in it, if any.
        capability: Which instructions ATen computes with.
        libc: The C library.
        system: The kernel.
    """

    torch: str
    golden: str
    mkl: str | None
    onednn: str | None
    capability: str
    libc: str
    system: str


def judge_software(software: Software, processor: Processor) -> Iterator[Finding]:
    """What the processor and the libraries mean for portable arithmetic."""
    portable = {"avx2", "fma"} <= set(processor.features)
    yield _finding("processor", portable, str(processor), "arithmetic='portable' needs AVX2 and FMA; use 'native'")
    whole = bool(software.mkl and software.onednn)
    build = f"{software.torch}, MKL {software.mkl}, oneDNN {software.onednn}"
    yield _finding("torch", whole, build, "arithmetic='portable' needs MKL and oneDNN; install torch from PyPI")
    if software.torch.partition("+")[0] != software.golden:
        remedy = f"the golden table belongs to {software.golden}; pip install torch=={software.golden} to compare"
        yield Finding("torch version", "note", software.torch, remedy)


def judge(facts: Facts) -> Iterator[Finding]:
    """What the machine means for runs."""
    release = tuple(int(part) for part in re.findall(r"\d+", facts.kernel)[:2])
    yield _finding("kernel", release >= (5, 3), facts.kernel, "evenstep needs Linux 5.3 or later", bad=True)
    both = facts.has_memfd and facts.has_pidfd
    said = f"memfd {_word(facts.has_memfd)}, pidfd {_word(facts.has_pidfd)}"
    yield _finding("system calls", both, said, "allow memfd_create and pidfd_open in the sandbox's profile", bad=True)
    yield from _namespaces(facts)
    yield from _memory(facts)
    yield from _limits(facts)
    yield from _cores(facts)
    yield from _gpus(facts)


def _namespaces(facts: Facts) -> Iterator[Finding]:
    own = "/proc is that of this process namespace" if facts.sees_itself else "/proc belongs to other processes"
    yield _finding("namespaces", facts.sees_itself, own, "mount /proc inside the container", bad=True)
    if facts.ptrace_scope is not None:
        found = f"kernel.yama.ptrace_scope is {facts.ptrace_scope}"
        remedy = "torchrun's workers cannot share memory; use `evenstep run`, or sysctl kernel.yama.ptrace_scope=1"
        yield _finding("access", facts.ptrace_scope < 2, found, remedy)


def _memory(facts: Facts) -> Iterator[Finding]:
    if facts.shared_bytes is None:
        yield Finding("shared memory", "note", "no /dev/shm", "mount one, or use loaders=0: loader processes need it")
    else:
        found = f"/dev/shm has {facts.shared_bytes // _MIB} MiB"
        remedy = "loader processes hand batches over there: docker run --shm-size 2g, or loaders=0"
        yield _finding("shared memory", facts.shared_bytes >= _SHARED_BYTES, found, remedy)
    if facts.memory_bytes is not None:
        yield Finding("memory", "ok", f"{facts.memory_bytes // _MIB} MiB available")


def _limits(facts: Facts) -> Iterator[Finding]:
    few = facts.open_files is not None and facts.open_files < _OPEN_FILES
    found = "no limit" if facts.open_files is None else str(facts.open_files)
    yield _finding("open files", not few, found, f"ulimit -n {4 * _OPEN_FILES}: every worker has several")
    for name, value, flag in (("file size", facts.file_bytes, "-f"), ("address space", facts.address_bytes, "-v")):
        found = "no limit" if value is None else f"at most {value // _MIB} MiB"
        yield _finding(name, value is None, found, f"ulimit {flag} unlimited: workers map a sparse file", bad=True)


def _cores(facts: Facts) -> Iterator[Finding]:
    found = f"{facts.usable_cores} of {facts.cores} may be used"
    usable = float(facts.usable_cores)
    if facts.quota_cores is not None:
        found += f", {facts.quota_cores:g} at a time"
        usable = min(usable, facts.quota_cores)
    whole = facts.quota_cores is None or facts.quota_cores >= facts.usable_cores
    remedy = f"evenstep run -n {max(1, int(usable))}: more workers would wait for the quota; or docker run --cpus"
    yield _finding("cores", whole, found, remedy)
    busy = facts.load > usable
    yield _finding("load", not busy, f"{facts.load:.1f}", "others use this machine: figures will be noisy")


def _gpus(facts: Facts) -> Iterator[Finding]:
    if not facts.gpus:
        yield Finding("GPU", "ok", "none")
        return
    yield Finding("GPU", "ok", ", ".join(facts.gpus))
    remedy = "several workers of one GPU wait for each other without it: nvidia-cuda-mps-control -d"
    yield _finding("MPS", facts.mps, "running" if facts.mps else "not running", remedy)


def _finding(name: str, good: bool, found: str, remedy: str, *, bad: bool = False) -> Finding:
    return Finding(name, "ok", found) if good else Finding(name, "bad" if bad else "note", found, remedy)


def _word(there: bool) -> str:
    return "there" if there else "missing"
