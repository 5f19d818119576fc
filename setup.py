"""Builds the C core; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "evenstep.native.core",
            sources=["src/evenstep/native/core.c", "src/evenstep/native/module.c"],
            depends=["src/evenstep/native/core.h"],
            extra_compile_args=["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off"],
        )
    ]
)
