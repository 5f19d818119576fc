"""`evenstep doctor`: what this machine is like, which bits it computes, and how it compares with another."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from evenstep.arithmetic import settings
from evenstep.core.config import ARITHMETICS

if TYPE_CHECKING:
    from evenstep.doctor.report import Diagnosis

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_parser"]


def add_parser(commands: "Commands") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check whether this machine is fit for runs, and which bits it computes",
        description="Examine this machine: processor, libraries, limits, each with a remedy; compute the operations of "
        "the probe and say which of them differ from the golden table, or from another machine. Exit code 1: something "
        "differs, or runs would fail.",
    )
    parser.add_argument(
        "--arithmetic", choices=ARITHMETICS, default="portable", help="how to compute (default: portable)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="compare with a report of --json from elsewhere")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    settings.choose(options.arithmetic)
    from evenstep.doctor.report import examine, read_report  # here: it imports torch, which must wait for the settings

    other = options.compare and read_report(options.compare)
    report = examine(options.arithmetic)
    if options.json:
        print(report.to_json())
    elif other is None:
        print("\n".join(report.lines()))
    if other is not None:
        return _compare(report, other)
    return 0 if report.healthy else 1


def _compare(report: "Diagnosis", other: "Diagnosis") -> int:
    facts, operations = report.compare(other)
    for fact in facts:
        print(fact)
    if report.arithmetic != other.arithmetic:
        print(f"use --arithmetic {other.arithmetic}, as there")
    total, alone = len(report.operations.keys() & other.operations), report.operations.keys() ^ other.operations
    if alone:
        print(f"{len(alone)} operations were computed on one of the two only; compare the same versions of evenstep")
    if not total:
        return 1
    if operations:
        print(f"{len(operations)} of {total} operations differ from {other.host}: {', '.join(operations)}")
        return 1
    print(f"all {total} operations are as on {other.host}")
    return 0
