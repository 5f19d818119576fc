"""Prints the modules that have no test of their own name: `python tests/untested.py [package ...]`."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "evenstep"
PACKAGES = ("engine", "exchange", "run", "launch")

for package in sys.argv[1:] or PACKAGES:
    for module in sorted((SOURCE / package).rglob("*.py")):
        inside = module.relative_to(SOURCE)
        if module.stem != "__init__" and not (TESTS / inside.with_name(f"test_{module.name}")).exists():
            print(inside)
