# baton. `make demo` shows the whole road on this machine, `make test` runs lint, types and the first tier of the tests.
#
#   PYTHON=python3.12    the interpreter that makes .venv; default: the first >= 3.10 found
#   TORCH_INDEX=URL      where torch comes from besides pip's own index; default: PyTorch's CPU wheels, unless there is
#                        an NVIDIA driver; TORCH_INDEX= (empty): pip's own index only
#   ARGS=...             arguments of `baton demo`, such as --once
#   TESTS=...            the files or folders that the three test commands look at; default: all
#   SEEDS=N              how many seeds `make sim` plays; default: 20000
#   SPREAD=              tests in one process; default: -n 2, two of them
#   ROWS=F01,F08         what `make faults` plays; default: all
#   SHARDS=6             so many of them at a time, each on two cores of its own
#   JUDGES=openai        which judges `make judges` asks; default: all

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check
FOLDERS := bench cluster decode deploy engine kernels kvtransfer prefill router training worker
ARGS ?=
TESTS ?= tests
SEEDS ?= 20000
SPREAD ?= -n 2
ROWS ?=
JUDGES ?=

# uv reads no settings of pip; the options name all that a lock depends on
COMPILE := $(BIN)/uv --no-config pip compile --quiet --custom-compile-command "make lock" --no-annotate --generate-hashes
IMAGES := deploy/packaging/images
IMAGE_PLATFORM := --python-version 3.11 --python-platform x86_64-manylinux_2_36 --only-binary :all:
OF_IMAGE := pyproject.toml --extra otel --constraints constraints.txt $(IMAGE_PLATFORM)
CYCLONEDX := cyclonedx-bom==7.5.0

BUILDER ?= docker
DEVICE ?= cpu
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' __init__.py)

MODEL ?= $(HOME)/.cache/baton/models/smollm2-135m-instruct

# tests start hundreds of Python processes: without cached bytecode each of them compiles all its modules again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: bench-router help venv install model demo lint sim test test-cluster test-full faults judges deploy-check lock image sbom clean

help:
	@printf '%s\n' 'make demo       a cluster on this machine answers one request (ARGS=--once: then stops)' \
	  'make test       lint, types, the first tier of the tests: minutes (TESTS=tests/unit: some of them)' \
	  'make test-cluster  the second tier: clusters of real processes, faults, the real model' \
	  'make test-full  lint, types and every test' \
	  'make faults     real processes die, hang and leave: the table of faults (ROWS=F01,F08: some of them)' \
	  'make deploy-check  units, manifests and chart, asked of systemd, kubectl and helm where they are installed' \
	  'make judges     clients that others wrote: openai, litellm, schemathesis, lm-eval and more (JUDGES=openai: some of them)' \
	  'make sim        a simulated cluster under SEEDS=20000 mixes of faults' \
	  'make lint       ruff and mypy --strict' \
	  'make bench-router  load on the router beside nginx, aiohttp and sglang-router (MODEL=DIR)' \
	  'make install    .venv with baton and all it needs' \
	  'make model      download and convert the demo model' \
	  'make lock       requirements.lock and the locks of the images: constraints.txt with hashes (asks PyPI)' \
	  'make image      a container image of every role (DEVICE=cuda, BUILDER=podman, ARGS=--build-arg=...)' \
	  'make sbom       what baton installs, as CycloneDX, on stdout' \
	  'make clean      remove .venv, .judges and what tools left'

venv: $(BIN)/python

$(BIN)/python:
	@for python in "$${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do \
	  if [ -n "$$python" ] && "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    echo "making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv $(VENV) || { rm -rf $(VENV); echo "no venv: install the package python3-venv" >&2; exit 1; }; \
	    exit 0; \
	  fi; \
	  if [ -n "$${PYTHON:-}" ]; then echo "PYTHON=$$PYTHON is not Python >= 3.10" >&2; exit 1; fi; \
	done; \
	echo "baton needs Python >= 3.10; found $$(python3 --version 2>&1 || true). Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1

install: $(VENV)/.installed

# torch first, pinned and without its dependencies: a looser requirement would pull a CUDA build over a CPU one, and only
# torch itself shall come from the other index. An index that does not answer is left out (pip would retry for minutes).
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@index='$(TORCH_INDEX)'; \
	if [ -n "$$index" ] && ! $(BIN)/python -c "import urllib.request as r; r.urlopen('$$index/', timeout=10)" 2>/dev/null; then \
	  echo "$$index does not answer; torch comes from pip's own index"; index=; \
	fi; \
	echo "installing $(TORCH)"; \
	$(PIP) install --no-deps $${index:+--extra-index-url "$$index"} '$(TORCH)'
	@echo 'installing baton and its dependencies (one to five minutes)'
	@$(PIP) uninstall -qq -y baton  # the former name; also a project of others with a package of that name
	@$(PIP) install -qq -e '.[test]' -c constraints.txt
	@touch $@

model: install
	@$(BIN)/baton model

demo: install
	@$(BIN)/baton demo $(ARGS)

# mypy must see the repository under its package name
lint: install
	$(BIN)/ruff check .
	@mkdir -p .lint && ln -sfn .. .lint/baton
	cd .lint && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache \
	  $(addprefix baton/,__init__.py __main__.py $(FOLDERS))

# A test's tier is in its markers: tests/meta/tiers.py. The first tier computes lint and types beside its tests.
PYTEST := $(BIN)/pytest $(SPREAD)

test: model
	@mkdir -p .lint; $(MAKE) --no-print-directory lint >.lint/report 2>&1 & lint=$$!; failed=0; \
	  $(PYTEST) -m 'not cluster and not slow and not gpu' --durations=15 $(TESTS) || failed=$$?; \
	  wait $$lint || failed=$$?; cat .lint/report; exit $$failed

# the wheel of NIXL (68 MB, 240 installed) only where tests use it: the second tier runs transfers over UCX on tcp
$(VENV)/.nixl: pyproject.toml constraints.txt | install
	@echo 'installing NIXL, for its tests'
	@$(PIP) install -qq -e '.[nixl]' -c constraints.txt
	@touch $@

test-cluster: model $(VENV)/.nixl
	$(PYTEST) -m 'cluster and not slow and not gpu' --durations=15 $(TESTS)

test-full: lint model $(VENV)/.nixl
	$(PYTEST) --durations=30 $(TESTS)

faults: install
	$(BIN)/python tests/faults/run.py $(if $(ROWS),--rows $(ROWS)) $(if $(SHARDS),--shards $(SHARDS))

# with the tools themselves: apt-get install systemd, and kubectl; helm and hadolint come with the tests; what is missing is
# skipped and named
deploy-check: install
	$(BIN)/pytest -rs tests/unit/deploy/packaging/test_units.py tests/meta/test_kubernetes.py tests/meta/test_helm.py tests/unit/deploy/keys/test_key_secret.py \
	  tests/meta/test_images.py tests/meta/kubernetes tests/cluster/test_managed.py tests/cluster/test_systemd_run.py

# the judges live apart, so that their dependencies cannot change what is judged
.judges/.installed: tests/judges/requirements.txt tests/judges/frameworks.txt tests/judges/clients.txt | $(BIN)/python
	$(BIN)/python -m venv .judges
	.judges/bin/python -m pip --disable-pip-version-check install -q -r tests/judges/requirements.txt
	.judges/bin/python -m pip --disable-pip-version-check install -q --no-deps guidellm==0.8.1
	$(BIN)/python -m venv .judges/frameworks
	.judges/frameworks/bin/python -m pip --disable-pip-version-check install -q -r tests/judges/frameworks.txt
	$(BIN)/python -m venv .judges/clients
	.judges/clients/bin/python -m pip --disable-pip-version-check install -q -r tests/judges/clients.txt
	@touch $@

judges: install .judges/.installed
	cd / && $(CURDIR)/$(BIN)/python -m baton.tests.judges.run $(if $(JUDGES),--only $(JUDGES))

# needs the network; run it after every change of constraints.txt
lock: install
	$(COMPILE) constraints.txt --universal --python-version 3.10 --no-deps -o requirements.lock
	$(COMPILE) $(OF_IMAGE) --torch-backend cpu --no-emit-package triton -o $(IMAGES)/cpu.lock
	$(COMPILE) $(OF_IMAGE) -o $(IMAGES)/cuda.lock
	echo '$(CYCLONEDX)' | $(COMPILE) - $(IMAGE_PLATFORM) -o $(IMAGES)/tools.lock

image:
	$(BUILDER) build -f deploy/packaging/images/Dockerfile --build-arg DEVICE=$(DEVICE) -t baton:$(VERSION)$(filter-out -cpu,-$(DEVICE)) $(ARGS) .

# the proxies beside it have a venv of their own; nginx and wrk come from the system
bench-router: install model .bench-peers/.installed
	@cd / && $(CURDIR)/$(BIN)/baton bench router --model $(MODEL) --peers-python $(CURDIR)/.bench-peers/bin/python $(ARGS)

.bench-peers/.installed:
	$(BIN)/python -m venv .bench-peers
	.bench-peers/bin/pip --disable-pip-version-check install -q 'aiohttp>=3.10' 'sglang-router>=0.3.2'
	@touch $@

sbom: install
	@$(BIN)/uv tool run --from '$(CYCLONEDX)' cyclonedx-py requirements requirements.lock --output-reproducible --sv 1.6

sim: install
	$(BIN)/python -m baton.tests.sim.cluster_main --seeds $(SEEDS)

clean:
	rm -rf $(VENV) .judges .lint build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
