"""The C core builds without a warning, also as the compiler of another processor would see it."""

import re
import subprocess
from pathlib import Path

import pytest

import evenstep.native

NATIVE = Path(evenstep.native.__file__).parent
FREE_OF_PYTHON = ["core.c", "copy.c", "checksum.c", "reduce.c", "ways.c", "collective.c", "mail.c", "norm.c"]
FREE_OF_PYTHON += ["parallel.c", "product.c", "blas.c", "functions.c", "redirect.c"]
STRICT = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror"]


@pytest.mark.parametrize("name", FREE_OF_PYTHON)
def test_the_core_compiles_without_a_warning(name):
    once = "-Dtarget_clones(...)=unused"  # the copies of a function for several processors have the same warnings
    for optimize in (["-O0"], ["-O3", once]):
        command = [*STRICT, *optimize, "-c", "-o", "/dev/null", NATIVE / name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_without_the_macros_of_x86_nothing_of_x86_is_left():
    undefined = ["-U__x86_64__", "-U__x86_64", "-U__amd64__"]
    source = "".join((NATIVE / name).read_text() for name in FREE_OF_PYTHON)
    source = re.sub(r"#include.*", "", source)  # the system's headers are for this processor
    command = ["gcc", "-E", "-P", *undefined, "-D__aarch64__", "-x", "c", "-"]
    ours = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    assert "yield" in ours
    assert "es_tree_reduce" in ours
    assert not re.search(r"ia32|target_clones|immintrin|_mm\d*_|rdtsc", ours)
