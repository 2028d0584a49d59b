# The targets of a checkout. Each sets up what it needs in .venv; the second time that takes no time.
#   make demo [QUICK=1]  train an RL-token policy on a LIBERO task and report it beside the frozen VLA
#   make lerobot-demo [QUICK=1]  train policies with LeRobot (in .venv-lerobot), practice them with rlt, print a table
#   make test            the tests, two files at a time (JOBS=1: one); COVERAGE=1 also shows which lines they reach
#   make test-all        the tests that take long as well: every week, and before a release
#   make libraries       the environments of the examples with other RL libraries
#   make wheel-test      the wheel in a fresh environment
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONFIG ?= $(if $(QUICK),demo_quick,demo)
PYTEST_ARGS ?=
# Tests of one file follow one another. More than two want more memory than a laptop has: some start simulators and Ray.
JOBS ?= 2
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# Pictures are drawn on the CPU unless the caller says otherwise (MUJOCO_GL=egl on a machine with a GPU).
export MUJOCO_GL ?= osmesa
export PYOPENGL_PLATFORM ?= $(MUJOCO_GL)
# A run starts many processes. Without .pyc files each of them would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo lerobot-demo libraries test test-all wheel-test pytest type lint format check doc schema setup clean

setup: $(VENV)/.stamp-dev

# System libraries first: packages that pip has to compile need cmake and a compiler.
$(VENV)/.stamp-system: scripts/system_packages.sh
	@PYTHON="$(PYTHON)" bash scripts/system_packages.sh
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@touch $@

# --no-compile saves a minute: Python compiles a package when it is first imported, and most are never imported.
$(VENV)/.stamp-dev: $(VENV)/.stamp-system pyproject.toml constraints.txt
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable ".[dev,docs]"
	@touch $@

demo: $(VENV)/.stamp-dev
	$(BIN)/rlt train --config $(CONFIG) $(ARGS)

# LeRobot pins versions that rlt does not need, so it has an environment of its own. LEROBOT_PYTHON is Python 3.11 for LeRobot
# 0.4.4, with which the results were made; LEROBOT_TORCH is a version of torch (scripts/lerobot_env.sh).
LEROBOT := .venv-lerobot
LEROBOT_PYTHON ?= $(or $(shell command -v python3.11),$(PYTHON))

$(LEROBOT)/.stamp: scripts/lerobot_env.sh pyproject.toml
	PYTHON="$(LEROBOT_PYTHON)" bash scripts/lerobot_env.sh $(LEROBOT) $(LEROBOT_TORCH)
	@touch $@

lerobot-demo: $(LEROBOT)/.stamp
	QUICK="$(QUICK)" LEROBOT_BIN=$(LEROBOT)/bin bash examples/lerobot/demo.sh

# With COVERAGE=1 (about a fifth slower) also the ten files with most lines that no test reaches, and the total. What runs in
# other processes is not seen.
test: $(VENV)/.stamp-dev
	$(PYTEST) $(if $(COVERAGE),--cov=rlt_gym --cov=rlt_sb3 --cov-report=) $(PYTEST_ARGS)
ifdef COVERAGE
	@$(BIN)/python -m coverage report --sort=-miss | sed -n '1,12p;$$p'
endif

# Each library has an environment of its own over this one (scripts/library_env.sh).
LIBRARIES := torchrl tianshou rllib sbx skrl minari rl_zoo3

.venv-libraries/%/.stamp: scripts/library_env.sh $(VENV)/.stamp-dev
	bash scripts/library_env.sh $*
	@touch $@

libraries: $(LIBRARIES:%=.venv-libraries/%/.stamp)

test-all: $(VENV)/.stamp-dev libraries
	$(PYTEST) --all $(PYTEST_ARGS)

pytest: test

wheel-test: $(VENV)/.stamp-dev
	bash scripts/test_wheel.sh $(BIN)/python

# A JSON schema of the configuration, by which editors complete YAML files
schema: $(VENV)/.stamp-dev
	$(BIN)/python -m rlt_sb3.experiment.schema

type: $(VENV)/.stamp-dev
	$(BIN)/mypy

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint type pytest

doc: $(VENV)/.stamp-dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf build dist docs/_build .coverage .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find rlt_gym rlt_sb3 tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
