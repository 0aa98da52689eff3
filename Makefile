# A fresh clone needs Python >= 3.10, a C compiler and make.
#   make test    lint, types and all tests        make demo    an MoE layer on this machine's text
#   make lint    ruff and mypy only               make bench   speed beside gloo and the floor
#   make venv    .venv with everything            make clean   remove what was built
PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist worksteal
TORCH_VERSION ?= 2.13.0
# Extra arguments for installing torch, such as an index that serves CPU builds.
TORCH_PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
# With an NVIDIA GPU any torch will do; without one its CUDA libraries would be gigabytes of dead weight.
TORCH := $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==$(TORCH_VERSION))

.PHONY: venv test lint format demo bench clean
.DEFAULT_GOAL := test

venv: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "Python 3.10 or later is needed; run: make PYTHON=python3.12"; rm -rf $(VENV); exit 1; }
	@echo "Installing into $(VENV) (once; a few minutes) ..."
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install $(TORCH_PIP_ARGS) '$(TORCH)'
	@$(PIP) install --editable '.[dev]'
	@touch $@

lint: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "Not formatted; run: make format"; exit 1; }
	@$(BIN)/mypy --no-error-summary

format: $(STAMP)
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

test: lint
	@$(BIN)/pytest $(PYTEST_ARGS)

demo: $(STAMP)
	@$(BIN)/tileweave demo $(ARGS)

bench: $(STAMP)
	@$(BIN)/tileweave bench cpu $(ARGS)

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
