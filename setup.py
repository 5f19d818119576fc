"""Builds the C core; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "evenstep.native.core",
            sources=[f"src/evenstep/native/{name}.c" for name in ("core", "norm", "parallel", "module")],
            depends=[f"src/evenstep/native/{name}.h" for name in ("core", "norm", "norm_passes", "parallel")],
            extra_link_args=["-pthread"],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off"],
        )
    ]
)
