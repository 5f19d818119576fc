"""Builds the C core, for the stable ABI of Python 3.11; everything else is in pyproject.toml."""

from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CORE = [
    "core",
    "copy",
    "checksum",
    "reduce",
    "rows",
    "permutation",
    "ways",
    "collective",
    "mail",
    "posts",
    "norm",
    "parallel",
    "team",
    "view",
    "sums",
    "module",
]


def extension(module: str, *sources: str) -> Extension:
    """A module of evenstep.native and the C files that it is made of."""
    return Extension(
        f"evenstep.native.{module}",
        sources=[f"src/evenstep/native/{name}.c" for name in sources],
        depends=glob("src/evenstep/native/*.h"),
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        extra_link_args=["-pthread", "-lm"],
        extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off"],
    )


class BuildCore(build_ext):
    """Builds modules that every Python loads, and leaves none beside them that one Python would load instead."""

    def copy_extensions_to_source(self) -> None:
        """Put what was built into src/."""
        super().copy_extensions_to_source()
        for stale in Path("src/evenstep/native").glob("*.cpython-*.so"):
            stale.unlink()


setup(
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    ext_modules=[
        extension("core", *CORE),
        extension("arithmetic", "product", "blas", "functions", "caches", "redirect", "arithmetic"),
    ],
)
