# make help lists the targets. Everything runs in .venv, made from pyproject.toml and constraints.txt.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
ARGS ?=
# pip finds no newer torch than the pinned one, so no CUDA packages come along on a machine without a GPU
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help setup train text test test-all faults lint format types wheel clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: $(VENV)/.installed ## make .venv and install, pinned by constraints.txt

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch alone is some 200 MB) ..."
	@$(INSTALL) -e '.[dev]'
	@touch $@

train: setup ## train task=cifar on two ranks; ARGS="run.epochs=2 optim.lr=0.1" overrides, RANKS=1 changes the layout
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc_per_node=$(RANKS) -m trainer task=cifar $(ARGS)

text: setup ## train task=text on two ranks
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc_per_node=$(RANKS) -m trainer task=text $(ARGS)

test: setup ## the default tests: 4 minutes on two cores
	@$(BIN)/python -m pytest $(ARGS)

test-all: setup ## every test: the default ones and the slow ones
	@$(BIN)/python -m pytest -m '' $(ARGS)

faults: setup ## kills, power losses, damage, disk errors, two writers: every row; ARGS="--quick" for less
	@$(BIN)/python scripts/faults.py $(ARGS)

lint: setup ## ruff, as CI and pre-commit run it
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: setup ## mend what ruff can
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: setup ## mypy on trainer/
	@$(BIN)/mypy

wheel: setup ## build dist/*.whl
	@$(BIN)/python -m build --wheel

clean: ## remove what was built; runs/ stays
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache
