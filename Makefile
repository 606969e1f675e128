# SPDX-License-Identifier: Apache-2.0
# make demo     serve a small hybrid checkpoint, chat with it, extract its hidden states
# make drafter  train a drafter on the hidden states of that checkpoint, and serve with it
# make test     run the test suite
# All make the virtual environment and build the package on first use.

PYTHON ?= python3
VENV ?= .venv
# The exact pin matters: a range may pull a build for another accelerator.
TORCH ?= torch==2.13.0
PY := $(abspath $(VENV))/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PYTEST := $(PY) -m pytest -q --durations=15
# One module at a time per worker, each with one thread: modules keep their fixtures, cores are busy.
# In the order of the collection, slow modules first (tests/conftest.py).
# One more than two cores: tests wait for processes and clocks a fifth of their time.
WORKERS ?= 3
PARALLEL = OMP_NUM_THREADS=1 $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Every test belongs to one of these. A lane imports only the folders that hold its tests.
UNIT := not gpu and not nightly and not parity and not e2e and not extraction
PARITY := parity and not gpu and not nightly and not e2e and not extraction
E2E := e2e and not gpu and not nightly
EXTRACTION := extraction and not gpu and not nightly and not e2e
NIGHTLY := nightly and not gpu
# What test-layouts runs its tests with, and the modules that choose layouts themselves.
LAYOUTS ?= tp2 tp4 pp2 dp2 tp2pp2
# Where test-memory builds, and what it runs: every C++ op of CPUs, alone and in models.
SANITIZED := build/sanitized
OPS_OF_CPUS := tests/kernels/test_cpu_*.py tests/kernels/test_kda.py tests/kernels/test_mamba2.py tests/model_executor/models
ABOUT_LAYOUTS := ranks ranks_of_drafters staged_engines shared_experts expert_replica_ends rearranged_experts
export PATH := $(abspath $(VENV))/bin:$(PATH)
export OMP_NUM_THREADS ?= $(shell nproc)
# The suite starts a hundred processes, which would all compile the package and the tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv build clients demo drafter test lint test-unit test-parity test-layouts test-e2e test-extraction test-nightly \
	test-memory test-gpu wheel docs clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(VENV)/.installed: pyproject.toml setup.py Makefile
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed" >&2; exit 1; }
	@echo "==> virtual environment in $(VENV)"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --progress-bar on "$(TORCH)"
	$(PIP) install --progress-bar on "setuptools>=77,<81" wheel ninja "cmake>=3.25,<5"
	@# CUDA builds of torch bring Triton; elsewhere its interpreter runs the kernels' tests. Before
	@# the dependencies, one of which would bring a newer one.
	$(PY) -c "import triton" 2>/dev/null || $(PIP) install --progress-bar on "triton==3.6.0"
	@echo "==> dependencies, then the package itself (editable, C++ ops built in place)"
	$(PIP) install --progress-bar on --no-build-isolation -e ".[test]"
	@# speculators' own pins name packages with no CPU build; its client needs none of them.
	$(PIP) install --progress-bar on --no-deps "speculators==0.9.0" "hs-connectors==0.9.0"
	@# NIXL's pins bring a wheel for every CUDA; one is enough, and needs no GPU.
	$(PIP) install --progress-bar on --no-deps "nixl>=1.5,<2" "nixl-cu13>=1.5,<2"
	touch $@

# Clients whose pins differ from the tests' own; nothing of them is imported here.
CLIENTS := $(VENV)-clients
$(CLIENTS)/.installed: tests/e2e/clients/requirements.txt | $(VENV)/.installed
	@echo "==> clients in $(CLIENTS)"
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv --without-pip $(CLIENTS)
	$(PIP) --python $(CLIENTS)/bin/python install --progress-bar on -r $<
	touch $@

CSRC := $(shell find csrc CMakeLists.txt -type f 2>/dev/null)
$(VENV)/.built: $(VENV)/.installed $(CSRC)
	@echo "==> C++ ops"
	$(PY) setup.py -q build_ext --inplace
	touch $@

venv: $(VENV)/.installed ## make the virtual environment
build: $(VENV)/.built ## build the C++ ops in place
clients: $(CLIENTS)/.installed ## install the clients that have an environment of their own

demo: build ## serve, chat, extract, compare with transformers
	$(PY) examples/demo.py

drafter: build ## hidden states, a drafter trained on them, how much of it is accepted
	rm -rf build/drafter
	$(PY) examples/train_drafter.py --output build/drafter

test: lint test-unit test-parity test-e2e test-extraction ## everything that needs no GPU

lint: build ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@# Its workers must start within seconds, which a busy machine does not grant: then without.
	$(PY) -m mypy --num-workers 2 || $(PY) -m mypy

test-unit: build ## unit tests, kernels on CPU and in the Triton interpreter
	$(PARALLEL) tests --ignore=tests/e2e --ignore=tests/gpu --ignore=tests/parity -m "$(UNIT)"

test-parity: build ## token-exact against transformers
	$(PARALLEL) tests/parity tests/model_executor/models -m "$(PARITY)"

test-layouts: build ## parity and state memory with ranks, stages and replicas of LAYOUTS, one after another
	for layout in $(LAYOUTS); do \
		echo "==> $$layout"; \
		VLLM_TEST_LAYOUT=$$layout $(PARALLEL) tests/parity -m "$(PARITY)" $(ABOUT_LAYOUTS:%=--ignore=tests/parity/test_%.py) || exit 1; \
	done

test-e2e: build clients ## real server, real clients; every use of state memory is checked
	VLLM_SANITIZE=1 $(PARALLEL) tests/e2e tests/examples tests/parity -m "$(E2E)"

test-extraction: build ## hidden-state extraction, end to end but for servers (test-e2e)
	$(PARALLEL) tests/examples tests/e2e -m "$(EXTRACTION)"

test-nightly: build clients ## further cases of what the others test
	$(PARALLEL) tests --ignore=tests/gpu -m "$(NIGHTLY)"

test-memory: build ## C++ ops of CPUs under AddressSanitizer: a read past the end is an error
	@# In a copy of the tree: the package here keeps its ops.
	rm -rf $(SANITIZED)/tree && mkdir -p $(SANITIZED)/tree
	git ls-files -z | xargs -0 cp --parents -t $(SANITIZED)/tree
	cmake -G Ninja -S . -B $(SANITIZED)/ops -DCMAKE_BUILD_TYPE=Sanitized \
		-DVLLM_TORCH_DIR=$$($(PY) -c "import pathlib, torch; print(pathlib.Path(torch.__file__).parent)")
	cmake --build $(SANITIZED)/ops --target _C_cpu
	cp $(SANITIZED)/ops/_C_cpu.so $(SANITIZED)/tree/vllm
	cd $(SANITIZED)/tree && LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0:handle_segv=0 PYTHONPATH=. $(PARALLEL) $(OPS_OF_CPUS) \
		-m "not gpu and not nightly" -k "cpu-cpu or test_cpu or models" --deselect tests/kernels/test_cpu_isa.py

test-gpu: build ## what needs a GPU
	$(PYTEST) tests -m gpu

wheel: build ## one wheel in dist/
	$(PIP) wheel . --no-build-isolation --no-deps -w dist

docs: build ## regenerate the pages that are made from the code
	$(PY) docs/generate_cli.py

clean: ## remove build outputs
	rm -rf build dist *.egg-info $(VENV)/.built
