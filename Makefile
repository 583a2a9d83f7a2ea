# make help lists the targets. Everything runs in .venv, made from pyproject.toml and constraints.txt.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
ARGS ?=
PIP_ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install --quiet -c constraints.txt $(PIP_ARGS)
EXTRAS := bucket,export,hf,metrics,mpi,mlflow,notebook,parquet,ray,report,shards,slurm,optuna,wandb

define ABOUT_TORCH
installing into $(VENV) ...
On Linux torch's default wheels bring CUDA's libraries: 2.7 GB to download, not needed without an NVIDIA GPU.
torch's CPU wheel is some 200 MB. See pytorch.org's install selector for its index, and pass the index by
PIP_EXTRA_INDEX_URL or PIP_ARGS='--extra-index-url <URL>' after make train, text, test or setup (docs/start.md).
endef
export ABOUT_TORCH

.PHONY: help setup train text test test-all test-core faults lint format types docs wheel clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: $(VENV)/.installed-dev ## make .venv for development: the package, its extras and tools, pinned by constraints.txt

# The package alone, for training.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) show --quiet torch 2> /dev/null || echo "$$ABOUT_TORCH"
	@$(INSTALL) -e .
	@touch $@

# The package with what work on it needs: `dev` in pyproject.toml is a dependency group, which pip knows since 25.1.
$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) show --quiet torch 2> /dev/null || echo "$$ABOUT_TORCH"
	@$(BIN)/python -c 'import pip; assert tuple(map(int, pip.__version__.split(".")[:2])) >= (25, 1)' 2> /dev/null \
		|| $(PIP) install --quiet --upgrade $(PIP_ARGS) 'pip>=25.1'
	@$(INSTALL) --group dev -e '.[$(EXTRAS)]'
	@touch $(VENV)/.installed $@

train: $(VENV)/.installed ## train task=cifar on two ranks; ARGS="run.epochs=2 optim.lr=0.1" overrides, RANKS=1 changes the layout
	@$(BIN)/python -m trainer -n $(RANKS) task=cifar $(ARGS)

text: $(VENV)/.installed ## train task=text on two ranks
	@$(BIN)/python -m trainer -n $(RANKS) task=text $(ARGS)

test: setup ## the default tests, side by side: 6 minutes on two quiet cores
	@$(BIN)/python scripts/run_tests.py $(ARGS)

test-all: setup ## every test, the slow ones too, side by side
	@$(BIN)/python scripts/run_tests.py -m '' $(ARGS)

test-core: setup ## the core's tests in a tree without its companions
	@$(BIN)/python scripts/run_core_tests.py $(ARGS)

faults: setup ## kills, power losses, signals, hangs, two writers: every row; ARGS="--quick" for less
	@$(BIN)/python scripts/faults $(ARGS)

lint: setup ## ruff, as CI and pre-commit run it
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: setup ## mend what ruff can
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: setup ## mypy on trainer/
	@$(BIN)/mypy

docs: setup ## build the site of docs/ in build/site, with broken links as errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: setup ## build dist/*.whl
	@$(BIN)/python -m build --wheel

clean: ## remove what was built; runs/ stays
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
