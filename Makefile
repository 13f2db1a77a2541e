# Each target does its own set-up: a fresh clone needs only Python 3.11 or newer, pip, make and git.
#
# The virtual environment is made once, and brought up to date when pyproject.toml changes.
# torch is installed before the rest, by exact version, so that a machine which offers a CPU build of that
# version (through pip's own configuration, such as PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL) gets that one.

PYTHON      ?= python3
TORCH       ?= torch==2.13.0
JOBS        ?= 2
PYTEST_ARGS ?=
BENCH_ARGS  ?=

VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
STAMP   := $(VENV)/.installed
TREES   := $(wildcard mpfs cli tests benchmarks demo)

# An activated environment or a user's PYTHONPATH must not leak into ours.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format bench clean distclean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \2/p' $(MAKEFILE_LIST) | awk '{ t = $$2; $$1 = $$2 = ""; printf "  make %-10s %s\n", t, $$0 }'

setup: $(STAMP) ## Create .venv and install MPFS into it, with the development tools

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "MPFS needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@rm -f $@
	@echo "Installing MPFS and its tools into $(VENV); this is done once and takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install '$(TORCH)'
	$(PIP) install -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Import a family of models, merge under a budget, diff and check out
	$(BIN)/python demo/demo.py

test: $(STAMP) ## Run the main suite
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) $(PYTEST_ARGS)

test-slow: $(STAMP) ## Run the slow tests
	$(BIN)/python -m pytest -m slow -n $(JOBS) $(PYTEST_ARGS)

lint: $(STAMP) ## Check style, formatting and types
	$(BIN)/ruff check $(TREES)
	$(BIN)/ruff format --check $(TREES)
	$(BIN)/mypy

format: $(STAMP) ## Put imports and formatting in order
	$(BIN)/ruff check --fix $(TREES)
	$(BIN)/ruff format $(TREES)

bench: $(STAMP) ## Run the benchmarks
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

clean: ## Remove build products and tool caches
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(TREES) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the environment and the downloaded models, too
	rm -rf $(VENV) .cache
