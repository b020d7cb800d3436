.DEFAULT_GOAL := help
VENV ?= .venv
PY := $(VENV)/bin/python
ROOMS := libs kernels services tools
PORT ?= 8000
MODEL ?= smollm2-135m
LORA ?= remote
# Keep the working directory off sys.path: kernels/ must not pass for PyPI's `kernels`.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup lock proto fmt lint types arch unit kernels integration fuzz e2e test soak gpu up docs

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready ## Make the virtual environment and build the native library
$(VENV)/.ready: requirements/dev.txt requirements/torch.txt requirements/peft.txt requirements/helm.txt pyproject.toml scripts/setup.sh
	@bash scripts/setup.sh $(VENV)

lock: ## Compile the locks: requirements/dev.txt, and image.txt for the container image
	$(PY) -m uv pip compile requirements/dev.in --generate-hashes --no-emit-package infinilora --python-version 3.11 -o requirements/dev.txt
	$(PY) -m uv pip compile pyproject.toml $(foreach e,gateway coordinator engine lora-server cli demo,--extra $(e)) -c requirements/dev.txt \
		--generate-hashes --no-annotate --python-version 3.11 -o requirements/image.txt

proto: setup ## Regenerate the protobuf messages
	cd libs/protocol && $(abspath $(PY)) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. infinilora/protocol/generate.proto infinilora/protocol/lora.proto

docs: setup ## Write the tables of docs/settings.md, metrics.md and cases.md again
	PYTHONPATH=tests $(PY) tests/support/settings_page.py && PYTHONPATH=tests $(PY) tests/support/metrics_page.py && $(PY) tests/cases/table.py

fmt: setup ## Format
	$(PY) -m ruff format . && $(PY) -m ruff check --fix .
lint: setup ## Format check and lint
	$(PY) -m ruff format --check . && $(PY) -m ruff check .
types: setup ## mypy --strict, by path; benchmarks import their neighbours
	MYPYPATH=benchmarks $(PY) -m mypy $(ROOMS) tests benchmarks/*.py
	MYPYPATH=benchmarks/gpu:benchmarks $(PY) -m mypy benchmarks/gpu
arch: setup ## Import contracts and layout
	$(VENV)/bin/lint-imports && $(PY) -m pytest -q tests/architecture
unit: setup ## Unit and property tests: no GPU, no network, about a minute
	$(PY) -m pytest -q tests/unit tests/property -m "not soak"
kernels: setup ## Kernel tests: compiled CPU kernels, Triton by interpreter, Triton compiled for sm_90
	$(PY) -m pytest -q tests/kernels -m "not gpu and not soak"
integration: setup ## Real NATS, Redis and S3 servers, real links, single services
	$(PY) -m pytest -q tests/contract tests/integration -m "not soak"
fuzz: setup ## 20,000 strange files: headers, configs, archives, forms
	$(PY) -m pytest -q tests/fuzz -m "not soak"
e2e: setup ## The four services together, and every case of docs/cases.md
	$(PY) -m pytest -q tests/e2e tests/cases -m "not soak"
test: lint types arch unit kernels integration fuzz e2e ## Everything that needs no GPU; sets up what it needs
soak: setup ## The randomised tests at full length
	$(PY) -m pytest -q tests -m soak --timeout=7200
gpu: setup ## Tests and benchmarks on this machine's GPU: make gpu
	PYTHONPATH=benchmarks/gpu:benchmarks $(PY) benchmarks/gpu/run.py

up: setup ## Run everything here: make up [MODEL=smollm2-135m|smollm2-moe|/hf/dir] [PORT=8000] [LORA=remote|local]
	@exec $(VENV)/bin/infinilora up --model $(MODEL) --port $(PORT) --lora $(LORA)

bench-%: setup ## Run one benchmark of benchmarks/: make bench-NAME
	PYTHONPATH=benchmarks $(PY) benchmarks/bench_$(subst -,_,$*).py
