# Two commands do everything on a machine with Python 3.11+ and make: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint contract browser tutorials docs clean

demo: .venv/ready
	$(BIN)/refengine compare qwen3.5-tiny --page-size 48 --prompt-rows 256 --prompt @docs/prompt.txt --tokens 32

# Products of small matrices, one test process a core: threads of BLAS would only wait for each other.
test: export OPENBLAS_NUM_THREADS := 1
test: .venv/ready-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

contract: .venv/ready
	$(BIN)/refengine contract

# Headless Chromium out of the npm registry, for tests/test_trace_page.py, which is skipped without it.
browser:
	npm ci --prefix tests/browser --no-audit --no-fund

# Executed two at a time, as notebooks in build/tutorials.
tutorials: export OPENBLAS_NUM_THREADS := 1
tutorials: .venv/ready-tutorials
	$(BIN)/python -m refengine.lab.execute

# The site, in site/. A link or an anchor that leads nowhere stops it: mkdocs counts the warnings that it may print, so no --quiet.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/ready-docs
	$(BIN)/python -m refengine.lab.site build/docs
	$(BIN)/mkdocs build --strict --config-file build/docs/mkdocs.yml
	$(BIN)/python -m refengine.lab.site --offline site
	@echo "DOCS site/index.html"

clean:
	rm -rf .venv build site *.egg-info

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "refengine needs Python 3.11 to 3.13; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/ready: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/ready-test: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[test,dev]'
	@touch $@ .venv/ready

.venv/ready-docs: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@ .venv/ready

.venv/ready-tutorials: setup.cfg pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[tutorials]'
	@touch $@ .venv/ready
