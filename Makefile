# Every target does its own set-up: a .venv with pip, the development tools and the built C core.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test check bench chaos clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/evenstep/native/*.c src/evenstep/native/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: check
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/batchnorm.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/distributed.py
	$(BIN)/python benchmarks/server.py

SEED ?= 0
chaos: setup
	$(BIN)/python -m evenstep.testing.chaos --seed $(SEED) --seeds 3 --faults 150

clean:
	rm -rf $(VENV) build src/*.egg-info src/evenstep/native/*.so .pytest_cache .mypy_cache .ruff_cache
