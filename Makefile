# make setup | demo | test | lint | screenshots. Each does what is missing first and is quick when nothing is.
#
#   make demo PORT=8000 ARGS="--pair embedded"     serve the page on 127.0.0.1
#   make test TESTS="tests/kv -k rope"             run some tests (WORKERS=2 at a time)
#   make fuzz | load | soak MINUTES=30             the long versions: mutants and kills, real sessions, hours
#   make setup PYTHON=python3.12                   with another Python (3.11 or newer)
#
# Weights go to KV_WORKBENCH_HOME (default: kv-workbench in the user's cache folder) and are shared by all clones.

PYTHON ?= python3
PORT ?= 7860
ARGS ?=
TESTS ?=
MINUTES ?= 30
WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --no-input --quiet
OLD_PYTHON := Python 3.11 or newer is needed: name one with 'make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3'.
NO_CHROMIUM := No Chromium here, so browser tests are skipped; get it with: apt-get install -y chromium

export PYTHONUNBUFFERED := 1
export GRADIO_ANALYTICS_ENABLED := False
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: setup weights demo test lint format screenshots clean
.DELETE_ON_ERROR:

setup: weights

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "$(OLD_PYTHON)" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) \
		|| { echo "The virtual environment could not be made (on Debian: apt-get install -y python3-venv)." >&2; exit 1; }
	@touch $@

$(VENV)/.requirements: requirements.txt $(VENV)/.made
	@echo "Installing requirements.txt into $(VENV) ..." >&2
	@$(PIP) -r requirements.txt
	@touch $@

$(VENV)/.requirements-dev: requirements-dev.txt $(VENV)/.requirements
	@echo "Installing requirements-dev.txt into $(VENV) ..." >&2
	@$(PIP) -r requirements-dev.txt
	@touch $@

weights: $(VENV)/.requirements
	@$(PY) .ci/weights.py

demo: $(VENV)/.requirements
	@$(PY) .ci/weights.py || echo "The page starts without these weights, with the saved figures only." >&2
	@exec $(PY) app.py --port $(PORT) $(ARGS)

test: setup $(VENV)/.requirements-dev
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
		|| echo "$(NO_CHROMIUM)"
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

# Ten thousand artefacts, two thousand manifests, and kill -9 in saves and fits.
fuzz: $(VENV)/.requirements-dev
	@KV_FUZZ=long $(PY) -m pytest tests/fuzz $(TESTS)

# Each starts a server of its own on the embedded pair; the last line is one JSON object with `ok`.
load: setup
	@$(PY) -m tests.load.load $(ARGS)

soak: setup
	@$(PY) -m tests.load.soak --minutes $(MINUTES) $(ARGS)

lint: $(VENV)/.requirements-dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: $(VENV)/.requirements-dev
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

screenshots: $(VENV)/.requirements-dev
	@$(PY) .ci/screenshots.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis out
