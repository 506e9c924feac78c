# PYTHON builds the environment: 3.11, which the requirements are locked for. Later commands use .venv's.
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
UV ?= uv
STORE := $(or $(EAGLE3_HOME),.eagle3)
BIN := .venv/bin
PACKAGES := eagle3_pipeline eagle3_pipeline_tests tools
PYTEST := $(BIN)/pytest -rs $(PYTEST_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo dev test test-full check bench lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo 'EAGLE3_HOME=FOLDER     the store, engine state and Dagster home (default: .eagle3)'
	@echo 'PYTEST_FLAGS="-k plan" further options of test and test-full'

setup:  ## check the machine and build .venv (the targets below do it themselves)
	@$(or $(PYTHON),$(error no python3.11 or python3 on the PATH)) tools/setup_env.py

demo: setup  ## train, evaluate and publish a draft for SmolLM2-135M on this machine's CPU
	@$(BIN)/eagle3 demo

dev: setup  ## Dagster's web server and daemon
	DAGSTER_HOME="$$($(BIN)/eagle3 home)" $(BIN)/dagster dev -w workspace.yaml

test: setup  ## tests of the first tier; prints what it skips and leaves to test-full
	$(PYTEST) -m "not slow and not gpu and not ui"
	@echo 'NOT RUN here: slow and ui tests (make test-full), gpu tests ($(BIN)/pytest -m gpu -rs on a GPU machine)'

test-full: setup  ## all tests that need no GPU
	$(PYTEST) -m "not gpu"
	@echo 'NOT RUN here: gpu tests ($(BIN)/pytest -m gpu -rs on a GPU machine)'

check: setup  ## lint, format, types, import layers
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## measure throughput; asserts nothing
	$(BIN)/python -m eagle3_pipeline_tests.benchmarks

lock:  ## compile requirements/cpu.txt from cpu.in (needs uv)
	$(UV) pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes \
		--excludes requirements/excludes.txt -o requirements/cpu.txt $(UV_FLAGS) requirements/cpu.in

clean:  ## remove .venv and caches; asks before it removes the store
	rm -rf .venv .venv.lock .venv.log build dist *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(PACKAGES) -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [ -e "$(STORE)" ]; then \
		printf 'Remove the store %s as well? Every artifact in it is lost. [y/N] ' "$(STORE)"; \
		if read -r answer && [ "$$answer" = y ]; then rm -rf "$(STORE)"; else echo 'kept'; fi; \
	fi
