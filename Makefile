# make setup      creates .venv with everything the project needs
# make demo       trains three tiny models to pass on a code
# make test-fast  quick tests of every module: about a minute and a half
# make test       all tests except those marked slow: minutes; part of make check
# make test-slow  all tests, including the slow ones
# make test-gpu   tests that need a GPU
# make test-cluster  tests of teams over several processes, with the slow ones
# make test-cluster-all  the same, and every worker killed at every call
# make vllm-env   creates .venv-vllm, an environment with vLLM for a CPU, for sampling.engine: vllm
# make test-vllm  tests of sampling with vLLM itself, in that environment
# make inspect-env  creates .venv-inspect, an environment with inspect_ai, which a slow test of the server uses
# make load       CLIENTS clients (64) talk to the demo's team for SECONDS seconds (600): none lost, none mixed up
# make test-chaos random faults for SECONDS seconds (1200) with each of SEEDS (0 1 2)
# make fuzz       N hostile inputs (100000) for every reader of replies and files: an hour on one core
# make docs       builds the documentation site in build/site
# make check      style, types, import directions, tests: what a change must pass
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY ?= PASSIVE
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: what is compiled once is kept

.PHONY: setup demo test-fast test test-slow test-gpu test-cluster test-cluster-all vllm-env test-vllm inspect-env load test-chaos fuzz docs lint check clean
setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "teamtr needs Python 3.11 or newer; choose one with: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true  # on all cores, where pip compiles on one
	@touch $@

demo: setup
	$(BIN)/teamtr demo

# A worker takes work from another that has more left. One thread each: they share the cores. One more than there are
# cores was slower: the quick tests took 105 s instead of 97.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal \
  -n $$($(BIN)/python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "auto")')

test-fast: setup
	$(PYTEST) -m "not slow and not long"

test: setup
	$(PYTEST)

test-slow: setup
	$(PYTEST) -m "slow or not slow"

test-gpu: setup
	$(BIN)/python -m pytest tests/gpu

# Every worker imports all files that it is given, which takes half a minute for those of all tests.
CLUSTER = $$(grep -rl --include='test_*.py' 'mark\.cluster' tests)

test-cluster: setup
	$(PYTEST) -m "cluster and not matrix" $(CLUSTER)

test-cluster-all: setup
	$(PYTEST) -m cluster $(CLUSTER)

vllm-env: .venv-vllm/.ready

.venv-vllm/.ready: requirements-vllm.txt
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	@touch $@

# One at a time: a server takes all cores.
test-vllm: setup vllm-env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m vllm

inspect-env: .venv-inspect/.ready

.venv-inspect/.ready: requirements-inspect.txt
	$(PYTHON) -m venv --clear .venv-inspect
	.venv-inspect/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-inspect.txt
	@touch $@

CLIENTS ?= 64
load: SECONDS = 600
load: setup
	$(BIN)/python tests/load.py --clients $(CLIENTS) --seconds $(SECONDS)

SECONDS ?= 1200
SEEDS ?= 0 1 2
test-chaos: setup
	for seed in $(SEEDS); do \
	  OMP_NUM_THREADS=1 $(BIN)/python tests/chaos.py --seconds $(SECONDS) --seed $$seed || exit 1; \
	done

N ?= 100000
fuzz: setup
	$(BIN)/python tests/fuzz/driver.py --count $(N)

docs: setup
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || \
	  { echo "make docs needs mkdocs: $(BIN)/pip install -c constraints.txt -e '.[docs]'"; exit 1; }
	$(BIN)/teamtr reference --out docs/team-file.md
	$(BIN)/python tests/layout_page.py
	$(BIN)/python -m mkdocs build

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

clean:
	rm -rf .venv .venv-vllm .venv-inspect build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
