# make setup    an environment in .venv with everything the project needs
# make demo     the first five minutes: three tiny models learn to pass on a code
# make test-fast  the quick tests of every module, for while one works: a minute
# make test     all tests but those marked slow: minutes, and part of make check
# make test-slow  those as well;  make test-gpu  the ones that need a card
# make fuzz     100,000 hostile inputs for every reader of model words and files: an hour on one core
# make docs     the documentation site, in build/site
# make check    style, types, import directions, tests: what a change must pass
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: setup demo test-fast test test-slow test-gpu fuzz docs lint check clean
setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "teamtr needs Python 3.11 or newer; say which with: make setup PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/teamtr demo

# A worker takes work from another that has more left. One thread each: they share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-fast: setup
	$(PYTEST) -m "not slow and not long"

test: setup
	$(PYTEST)

test-slow: setup
	$(PYTEST) -m "slow or not slow"

test-gpu: setup
	$(BIN)/python -m pytest tests/gpu

fuzz: setup
	$(BIN)/python tests/fuzz/driver.py --count $(or $(N),100000)

docs: setup
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || \
	  { echo "make docs needs mkdocs: $(BIN)/pip install -c constraints.txt -e '.[docs]'"; exit 1; }
	$(BIN)/teamtr reference --out docs/team-file.md
	$(BIN)/python -m mkdocs build

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
