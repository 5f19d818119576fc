# Every target does its own set-up: a .venv with pip, the development tools and the built C core.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup browser demo pictures docs dist tried quick test test-gpu check lint types quick-tests tests bench performance chaos soak conformance clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/evenstep/native/*.c src/evenstep/native/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]'
	touch $@

# The tests of the server's page need a browser; without one they are skipped. It takes two minutes at most.
PACKAGES := chromium chromium-driver
INSTALL := apt-get -qq -y --no-install-recommends install $(PACKAGES)
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null && DEBIAN_FRONTEND=noninteractive \
	timeout 120 sh -c '$(INSTALL) || { apt-get -qq update && $(INSTALL); }' >/dev/null 2>&1; then exit 0; fi; \
	echo "the tests of the server's page are skipped: apt-get install $(PACKAGES)"

demo: setup
	$(BIN)/python examples/demo.py

# The packages, into dist: an sdist and a manylinux wheel for the stable ABI, built twice and compared.
dist: setup
	$(BIN)/python tools/dist.py dist

# The wheel on pairs of a Python and a torch, PAIRS='--pair python3.12 2.11.0 --pair python3.13 2.15.0'; docs/tried.md has the list.
PAIRS ?= --pair $(PYTHON) 2.13.0+cpu
tried: dist
	$(BIN)/python tools/tried.py --wheel dist/*.whl $(PAIRS)

# The pictures of the README, from real runs: the demo in a terminal, and the page of a run in a browser.
pictures: setup browser
	env -u MAKEFLAGS -u MAKELEVEL $(BIN)/python tools/terminal.py docs/pictures/demo.svg make demo
	$(BIN)/python tools/screenshot.py docs/pictures/page.png

# The manual, into build/manual, to be read from that folder: warnings are errors, and nothing comes from a network.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check: lint types

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python benchmarks/performance.py --check

types: setup
	$(BIN)/mypy

# Tests run in this many processes at a time, one more than there are cores: many wait. Those that are started often are compiled once.
LANES ?= 4
# WITHOUT="ray spark": those in the folders tests/ray and tests/spark, which start clusters, are left out.
WITHOUT ?=
$(foreach folder,$(WITHOUT),$(if $(wildcard tests/$(folder)/.),,$(error WITHOUT=$(folder), expected the name of a folder in tests)))
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONPATH=$(CURDIR)/tests/started$(PYTHONPATH:%=:%) $(BIN)/python -m pytest --lanes $(LANES) $(WITHOUT:%=--ignore=tests/%)

# Checks, and the tests that start no process. Types are checked while the tests are collected: that takes one core 20 s.
quick: lint
	$(MAKE) --no-print-directory --jobs 2 types quick-tests

test: lint browser
	$(MAKE) --no-print-directory --jobs 2 types tests

quick-tests: setup
	$(PYTEST) --quick

tests: setup
	$(PYTEST)

# Everything that needs a GPU. It takes the torch that is installed: make setup brings the one without CUDA.
GPU_PYTHON ?= python3
test-gpu:
	$(GPU_PYTHON) setup.py --quiet build_ext --inplace
	PYTHONPATH=$(CURDIR)/src $(GPU_PYTHON) -m pytest -q tests/engine/test_on_cuda.py tests/nn/test_on_gpu.py

# Every benchmark that needs no GPU, each into its own file, and the page that is made of them. One of them: make bench-recovery.
BENCHMARKS := engine portable recovery memory machines distributed server clusters recheck watching batchnorm
BENCHMARK_engine := engine.py
BENCHMARK_portable := engine.py --rows mlp-portable,resnet-portable,transformer-portable --clock processor
bench: $(addprefix bench-,$(BENCHMARKS))
	$(BIN)/python benchmarks/performance.py

bench-%: setup $(VENV)/.installed-bench
	$(BIN)/python benchmarks/$(or $(BENCHMARK_$*),$*.py) --json benchmarks/results/$*.json

$(VENV)/.installed-bench: $(STAMP)
	$(PIP) --editable '.[bench]'
	touch $@

# docs/performance.md and its charts, from benchmarks/results and the words in benchmarks/performance.md.
performance:
	$(PYTHON) benchmarks/performance.py

SEED ?= 0
# With RECHECK=1: 300 flipped bits, each of which has to be found and named.
# With MACHINES=3: over that many machines (network namespaces: as root), at least 300 faults of workers, machines and links.
chaos: setup
ifdef RECHECK
	$(BIN)/python -m evenstep.testing.flips --seed $(SEED) --flips 150
else ifdef MACHINES
	$(BIN)/python -m evenstep.testing.chaos_machines --seed $(SEED) --machines $(MACHINES) --faults 300
else
	$(BIN)/python -m evenstep.testing.chaos --seed $(SEED) --seeds 3 --faults 150
endif

# torch's own tests of a backend, against ours and against gloo.
conformance: setup
	$(BIN)/python tests/distributed/conformance.py

MINUTES ?= 60
soak: setup
	$(BIN)/python -m evenstep.testing.soak --minutes $(MINUTES) --seed $(SEED)

clean:
	rm -rf $(VENV) build src/*.egg-info src/evenstep/native/*.so .pytest_cache .mypy_cache .ruff_cache
