"""Prints the modules that have no test of their own name: `python tests/untested.py [package ...]`."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "evenstep"
PACKAGES = ("engine", "exchange", "launch", "plan", "run", "transport")


def untested(package: str) -> list[str]:
    """The modules of a package without a test of their own name, as paths in the source."""
    modules = (module.relative_to(SOURCE) for module in sorted((SOURCE / package).rglob("*.py")))
    named = ((module, TESTS / module.with_name(f"test_{module.name}")) for module in modules)
    return [str(module) for module, test in named if module.stem != "__init__" and not test.exists()]


if __name__ == "__main__":
    for package in sys.argv[1:] or PACKAGES:
        for module in untested(package):
            print(module)
