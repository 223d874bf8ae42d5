# What people type and what CI runs. The first use of a target makes .venv and
# installs what that target needs; a changed pyproject.toml installs it again.

PYTHON ?= python3
# What `make test` and `make fuzz` give to pytest besides.
ARGS ?=
# How many times the usual number of cases `make fuzz` runs; `make test` runs a fifth.
FUZZ ?= 1
# What `make test-cluster` runs.
CLUSTER ?= on_ray on_machines on_slurm

TORCH := 2.13.0
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet
EXTRAS := bench demo
GROUPS := test lint docs conformance cluster

.PHONY: test test-cluster demo lint bench docs fuzz fuzz-wire conformance clean
# Two pips in one .venv would get into each other's way.
.NOTPARALLEL:

# In parallel, one more than there are cores, as tests of processes mostly wait; for a
# debugger, or to see what is printed: .venv/bin/python -m pytest.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() + 1))')
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test: .venv/.test
	@echo "For less: make test ARGS='tests/wire -k codec', or ARGS='-m \"not slow\"'"
	$(PYTEST) $(ARGS)

demo: .venv/.demo
	$(BIN)/python -m gradwire demo --out build/demo

lint: .venv/.lint
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# Worlds on a Ray cluster of four nodes, on machines of a network, and under Slurm; all on this machine.
test-cluster: .venv/.cluster
	$(BIN)/python -m pytest -v -rs $(CLUSTER:%=tests/cluster/%.py) $(ARGS)

bench: .venv/.bench
	$(BIN)/python -m gradwire bench

# PyTorch's own test bodies, against Gradwire; SUITES='*Autograd*' for some of them.
conformance: .venv/.conformance
	$(BIN)/python tests/conformance $(SUITES)

docs: .venv/.docs
	$(BIN)/python -m mkdocs build --strict

# The tests whose number of cases is a choice. Such a test may take long: give it the time.
fuzz: .venv/.test
	GRADWIRE_FUZZ=$(FUZZ) $(BIN)/python -m tests.simulate
	GRADWIRE_FUZZ=$(FUZZ) $(PYTEST) -m fuzz --timeout=1800 $(ARGS)

# The same for all that reads what arrives: 24 is ten million inputs.
WIRE ?= 24
fuzz-wire: .venv/.test
	GRADWIRE_FUZZ=$(WIRE) $(PYTEST) -m fuzz --timeout=1800 \
		tests/wire/test_mutated_frames.py tests/wire/test_safe_encoding.py \
		tests/transport/test_mutated_handshakes.py tests/autograd/test_messages.py

clean:
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# torch on its own and pinned, so that every run measures and tests the same one;
# the version in the stamp's name makes a new pin install.
TORCH_STAMP := .venv/.torch-$(TORCH)

$(TORCH_STAMP):
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==$(TORCH)
	touch $@

$(EXTRAS:%=.venv/.%): .venv/.%: $(TORCH_STAMP) pyproject.toml
	$(INSTALL) -e '.[$*]'
	touch $@

$(GROUPS:%=.venv/.%): .venv/.%: $(TORCH_STAMP) pyproject.toml
	$(INSTALL) 'pip>=25.1' # the first that knows groups
	$(INSTALL) -e . --group $*
	touch $@
