# One thread a worker, as there are as many workers as cores; threads that wait sleep (OMP_WAIT_POLICY) and do not spin.
# Bytecode is kept whatever the environment says: tests start processes, and each would compile all of Shoal again.
# make run: set up .venv, run the default experiment.  make test: set up, run the whole test suite.
# make test-fast: the tests that are not marked slow.  make dist: wheel and sdist in dist/, and the wheel tried out.
# make docs: build the documentation into build/site.  make docs-serve: show it while you write, on localhost:8000.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: run test all-tests test-fast test-browser docs docs-serve dist setup setup-dev lint clean

run: setup
	$(PY) -m shoal run

PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(PY) -m pytest
EACH_CORE := --ignore=tests/browser --numprocesses auto --maxprocesses 4 --dist worksteal

# Side by side: mypy takes one core for more than a minute.
test: setup-dev
	$(MAKE) --jobs 2 lint all-tests

all-tests: setup-dev
	$(PYTEST) $(EACH_CORE)

test-fast: setup-dev
	$(PYTEST) $(EACH_CORE) -m "not slow"

# The report in a real Chromium, with axe-core; apt and npm bring them where they can, and tests skip, saying so, where
# they cannot.
test-browser: setup-dev
	command -v chromium >/dev/null || (timeout 300 apt-get update -qq && timeout 300 apt-get install -y -qq chromium) >/dev/null 2>&1 || true
	test -f build/axe/node_modules/axe-core/axe.min.js || timeout 120 npm install --silent --prefix build/axe axe-core@4 >/dev/null 2>&1 || true
	$(PYTEST) -rs tests/browser

# The wheel and the sdist, and the default experiment run from the wheel alone.
dist: setup-dev
	rm -rf dist build
	$(PY) -m build --no-isolation --outdir dist .
	$(PYTEST) tests/test_dist.py

MKDOCS := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs

docs: setup-dev
	$(MKDOCS) build --strict

docs-serve: setup-dev
	$(MKDOCS) serve

lint: setup-dev
	$(PY) -m ruff check src tests benchmarks docs
	$(PY) -m ruff format --check src tests benchmarks docs
	$(PY) -m mypy

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

# torch comes first and by its exact version: asked for in any other way it may bring gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[plots,tables,scattering,lfw]"
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
