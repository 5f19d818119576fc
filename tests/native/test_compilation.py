"""The C core builds without a warning, also as the compiler of another processor would see it."""

import re
import subprocess
from pathlib import Path

import pytest

import evenstep.native

NATIVE = Path(evenstep.native.__file__).parent
STRICT = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror"]


@pytest.mark.parametrize("name", ["core", "norm", "parallel"])
@pytest.mark.parametrize("optimize", ["-O0", "-O3"])
def test_the_core_compiles_without_a_warning(name: str, optimize: str):
    command = [*STRICT, optimize, "-c", "-o", "/dev/null", NATIVE / f"{name}.c"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_macros_of_x86_nothing_of_x86_is_left():
    undefined = ["-U__x86_64__", "-U__x86_64", "-U__amd64__"]
    source = re.sub(r"#include.*", "", (NATIVE / "core.c").read_text())  # the system's headers are for this processor
    command = ["gcc", "-E", "-P", *undefined, "-D__aarch64__", "-x", "c", "-"]
    ours = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    assert "yield" in ours
    assert "es_tree_sum" in ours
    assert not re.search(r"ia32|target_clones|immintrin|_mm\d*_|rdtsc", ours)
