# `make run` starts the whole system; `make test` proves it. `make` alone lists the targets.
# Variables: MODEL=<directory or hub id>, ARGS="<more words>", VENV=<directory>, PYTHON=<interpreter, 3.11 or newer>.
VENV ?= .venv
SERVER := $(VENV)/.installed-server
EXTENSION := setup.py $(wildcard kernels/cpu/csrc/* kvtransfer/csrc/*)
DEV := $(VENV)/.installed-dev
export VENV PYTHON
unexport PYTHONDONTWRITEBYTECODE # dozens of processes start here: each would compile our code anew

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo 'e.g.  make run MODEL=<directory or hub id> ARGS="--prefill 2"   (PYTHON=<interpreter>, VENV=<directory>)'

run: $(SERVER) ## install, then start Redis, prefill, decode and router and stream a sample answer (Ctrl-C ends it)
	@$(VENV)/bin/pdserve up $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: lint ## install what the tests need, lint, and run all tests but the slow ones
	@scripts/system_packages.sh
	$(VENV)/bin/pytest -m "not slow" --durations 12 $(ARGS)

test-slow: $(DEV) ## the tests that take longer
	@scripts/system_packages.sh
	$(VENV)/bin/pytest -m slow --timeout 900 $(ARGS) || [ $$? -eq 5 ] # 5: there is none

lint: $(DEV) ## ruff, mypy, import contracts, buf, generated code
	@scripts/lint.sh

fmt: $(DEV) ## format and fix what can be fixed
	$(VENV)/bin/ruff check --fix-only . && $(VENV)/bin/ruff format .
	$(VENV)/bin/buf format --write

protos: $(DEV) ## generate the Python code of the protos
	@scripts/protos.sh

bench: $(SERVER) ## measure a running system: make bench ARGS="--request-rate 2"
	@$(VENV)/bin/pdserve bench serve $(ARGS)

constraints: $(DEV) ## write constraints.txt from what is installed
	@scripts/constraints.sh

clean: ## remove caches and build products (not the virtual environment)
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

$(SERVER): pyproject.toml constraints.txt scripts/install.sh $(EXTENSION)
	@scripts/install.sh server && touch $@

$(DEV): pyproject.toml constraints.txt scripts/install.sh $(EXTENSION)
	@scripts/install.sh server,bench,dev,nixl,mooncake && touch $@ $(SERVER)

.PHONY: help run test test-slow lint fmt protos bench constraints clean
