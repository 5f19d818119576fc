"""Builds the C core; everything else is in pyproject.toml."""

from glob import glob

from setuptools import Extension, setup

CORE = [
    "core",
    "copy",
    "checksum",
    "reduce",
    "ways",
    "collective",
    "mail",
    "norm",
    "parallel",
    "team",
    "sums",
    "module",
]


def extension(module: str, *sources: str) -> Extension:
    """A module of evenstep.native and the C files that it is made of."""
    return Extension(
        f"evenstep.native.{module}",
        sources=[f"src/evenstep/native/{name}.c" for name in sources],
        depends=glob("src/evenstep/native/*.h"),
        extra_link_args=["-pthread", "-lm"],
        extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off"],
    )


setup(
    ext_modules=[
        extension("core", *CORE),
        extension("arithmetic", "product", "blas", "functions", "caches", "redirect", "arithmetic"),
    ]
)
