# Every verb of this repository. `make` alone lists them.

.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
# The long forms, less what this machine cannot run: MARKS="not ray" on a machine with GPUs.
MARKS ?= not gpu and not multi_gpu and not ray

.PHONY: help serve test test-all lint check clean

help:
	@echo "make serve                set up, then serve a small model on http://127.0.0.1:8000"
	@echo "     PORT=9000            on another port"
	@echo "     ARGS='ORG/NAME …'    another model, other options (see octavo serve --help)"
	@echo "make test                 set up, then the default test suite (ARGS=… goes to pytest)"
	@echo "make test-all             the long forms too"
	@echo "make lint                 style, types, and the direction of imports"
	@echo "make check NAME=start     measure one claim: PASS or FAIL a line, figures in benchmarks/results"
	@echo "make clean                remove what make made here (not the models in your cache folder)"

serve: .venv/.base
	@$(BIN)/octavo serve $(if $(PORT),--port $(PORT)) $(ARGS)

test: .venv/.test
	@$(BIN)/python -m pytest $(ARGS)

test-all: .venv/.test
	@$(BIN)/python -m pytest -m "$(MARKS)" $(ARGS)

lint: .venv/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: .venv/.test
	@$(if $(NAME),,echo "Which one? make check NAME=x, for an x in benchmarks/checks/" >&2; exit 2)
	@$(BIN)/python -m benchmarks.check $(NAME) $(ARGS)

clean:
	rm -rf .venv build dist octavo.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Stamps: a second run of a verb is instant until the dependencies change.
.venv/.base: pyproject.toml scripts/setup.sh
	@scripts/setup.sh base

.venv/.test .venv/.lint: .venv/.base
	@scripts/setup.sh $(@:.venv/.%=%)
