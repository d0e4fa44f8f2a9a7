# `make generate` and `make test` do all of the set-up from nothing, and are quick when it is done.
#   make PYTHON=/path/to/python3.13 ...   the Python to make .venv with
#   make generate ARGS="--prompt 'Why is the sky blue?'"
#   make test ARGS="tests/models -k rope"

SHELL := /bin/bash
PY := .venv/bin/python
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n > 8 ? 8 : n)))
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist worksteal
export PYTHON

.PHONY: help setup gpu generate test test-full test-gpu lint format readme-tree lock

help:
	@echo "make generate     a real model answers a prompt (ARGS=... are passed on)"
	@echo "make test         the tests of about 11 minutes on 2 cores"
	@echo "make test-full    the long batteries too"
	@echo "make test-gpu     the tests that need NVIDIA cards"
	@echo "make lint         ruff and pyright"
	@echo "make format       ruff, repairing what it can"
	@echo "make gpu          install the GPU libraries"
	@echo "make readme-tree  print the tree for the README (ARGS=--write puts it in)"
	@echo "make lock         resolve requirements/ again"

setup:
	@bash scripts/setup.sh

gpu:
	@bash scripts/setup.sh gpu

generate: setup
	@$(PY) scripts/generate.py $(ARGS)

test: setup
	$(PYTEST) -m "not slow and not gpu and not multi_gpu" $(ARGS)

test-full: setup
	$(PYTEST) -m "not gpu and not multi_gpu" $(ARGS)

# One process: two would share the card's memory.
test-gpu: gpu
	$(PY) -m pytest -m "gpu or multi_gpu" $(ARGS)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

readme-tree: setup
	@$(PY) scripts/readme_tree.py $(ARGS)

lock: setup
	$(PY) scripts/lock.py
