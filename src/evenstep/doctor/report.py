"""One machine's report: what it is, what was found, and which bits it computes; and two of them side by side."""

import json
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from evenstep.arithmetic.portable import Portable
from evenstep.arithmetic.probe import differing, golden, probe
from evenstep.arithmetic.processor import Processor, read_processor
from evenstep.core import env
from evenstep.core.errors import ConfigError
from evenstep.doctor.checks import Finding, Software, judge, judge_software
from evenstep.doctor.facts import read_facts

__all__ = ["Diagnosis", "examine", "read_report"]


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says of a machine.

    Attributes:
        host: Its name.
        arithmetic: "native" or "portable".
        processor: The kind of processor.
        software: The libraries that compute.
        settings: The variables that they choose their kernels by.
        findings: What was looked at.
        operations: A digest for every operation of the probe.
    """

    host: str
    arithmetic: str
    processor: Processor
    software: Software
    settings: dict[str, str | None]
    findings: list[Finding]
    operations: dict[str, str]

    def to_json(self) -> str:
        """The report as one line of JSON."""
        return json.dumps({**asdict(self), "differ": self.differ})

    @property
    def differ(self) -> list[str] | None:
        """The operations that differ from the golden table; None where it does not apply."""
        table = golden()
        applies = self.arithmetic == "portable" and self.software.torch.partition("+")[0] == table.torch
        return differing(self.operations, table.operations) if applies and self.operations else None

    @property
    def healthy(self) -> bool:
        """Whether runs will work, and portable ones give the same bits as everywhere."""
        return not self.differ and all(finding.state != "bad" for finding in self.findings)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        software = self.software
        set_here = " ".join(f"{name}={value}" for name, value in self.settings.items() if value is not None)
        yield f"{self.host}: {self.processor}"
        yield f"torch {software.torch}, computing with {software.capability}; {software.libc}; {software.system}"
        yield f"{self.arithmetic} arithmetic; {set_here or 'no variable chooses kernels'}"
        yield ""
        for finding in self.findings:
            yield f"{finding.state:<5} {finding.name:<14} {finding.found}"
            if finding.remedy:
                yield f"{'':<5} {'':<14} -> {finding.remedy}"
        yield ""
        yield from self._verdict()

    def _verdict(self) -> Iterator[str]:
        differ, count = self.differ, len(self.operations)
        if differ is None:
            table = f"the golden table is for portable arithmetic with torch {golden().torch}"
            yield f"{count} operations computed; {table}"
        elif not differ:
            yield f"all {count} operations have the bits of the golden table"
        else:
            yield f"{len(differ)} of {count} operations differ from the golden table: {', '.join(differ)}"

    def compare(self, other: "Diagnosis") -> tuple[list[str], list[str]]:
        """What differs from another machine: facts that choose kernels, as sentences; and operations, by name."""
        mine, theirs = (
            {**asdict(r.software), "processor": str(r.processor), "arithmetic": r.arithmetic, **r.settings}
            for r in (self, other)
        )
        facts = [f"{key}: {mine[key]} here, {theirs[key]} there" for key in mine if mine[key] != theirs.get(key)]
        return facts, differing(self.operations, other.operations)


def examine(arithmetic: str) -> Diagnosis:
    """Examine this machine. The arithmetic must have been chosen before torch was loaded.

    Where it is not available no operation is computed, and a finding says why.
    """
    config = torch.__config__.show()
    versions = [re.search(pattern, config) for pattern in (r"Math Kernel Library Version (\S+?)-", r"MKL-DNN v(\S+)")]
    mkl, onednn = (found and found[1] for found in versions)
    capability, libc = torch.backends.cpu.get_cpu_capability(), " ".join(platform.libc_ver())
    software = Software(torch.__version__, golden().torch, mkl, onednn, capability, libc, platform.platform())
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    processor = read_processor()
    findings = [*judge_software(software, processor), *judge(read_facts(gpus))]
    operations: dict[str, str] = {}
    try:
        operations = _probe_portably() if arithmetic == "portable" else probe()
    except ConfigError as error:
        findings.append(Finding("arithmetic", "note", "not portable", str(error)))
    return Diagnosis(platform.node(), arithmetic, processor, software, env.kernel_choices(), findings, operations)


def _probe_portably() -> dict[str, str]:
    portable = Portable("warn", sample=False)
    try:
        return probe()
    finally:
        portable.close()


def read_report(path: Path) -> Diagnosis:
    """A report that `Diagnosis.to_json` has written.

    Raises:
        ConfigError: There is no report there.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        del found["differ"]
        found["processor"] = Processor(**{**found["processor"], "features": tuple(found["processor"]["features"])})
        found["software"] = Software(**found["software"])
        found["findings"] = [Finding(**finding) for finding in found["findings"]]
        return Diagnosis(**found)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is not a machine's report ({error}); write one there with `evenstep doctor --json > {path.name}`"
        ) from error
