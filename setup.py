"""Builds the C core; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "evenstep.native.core",
            sources=[f"src/evenstep/native/{name}.c" for name in ("core", "norm", "module")],
            depends=["src/evenstep/native/core.h", "src/evenstep/native/norm.h", "src/evenstep/native/norm_passes.h"],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off"],
        )
    ]
)
