# The front door. `make` lists the targets; each prints the plain command that it runs.
#
#   VENV=dir     the environment (.venv), made and kept up to date as needed;
#                VENV=none uses $(PYTHON) as it is and installs nothing
#   PYTHON=exe   the Python that makes the environment (python3)
#   EXTRAS=a,b   what `make setup` installs beside the core (dev; also bench, data)
#   ARGS="..."   handed on to train.py, pytest, bench or bench.tune

VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= dev

.DEFAULT_GOAL := help
.PHONY: help setup train test test-full parity bench bench-regress gpu tune reproduce lint fmt clean .python .fresh
.NOTPARALLEL:
.SUFFIXES:

fail = { echo "error: $(1)" >&2; exit 1; }
# Old syntax, so that an old interpreter gets far enough to be refused.
check_version = $(1) -c 'import sys; v = sys.version_info; v < (3, 11) and \
	sys.exit("error: fastgpt needs Python 3.11 or newer; $(1) is %d.%d.%d" % v[:3])'

# --- environment -------------------------------------------------------------------------------

.python:
	@command -v $(PYTHON) >/dev/null || $(call fail,$(PYTHON) was not found; name a Python: make PYTHON=python3.12)
	@$(call check_version,$(PYTHON))

ifeq ($(VENV),none)

PY := $(PYTHON)
env = .python

else

PY := $(VENV)/bin/python
# A finished install leaves the stamp $(VENV)/.fastgpt-<hash>/<extras>. BUSY holds the process that
# installs, from the first write to the last: an install that was cut short never looks finished.
HASH := $(shell cat pyproject.toml constraints.txt | cksum | tr ' ' -)
BUSY := $(VENV)/.busy
env = $(VENV)/.fastgpt-$(HASH)/$(1)

# The environment is used if it is not BUSY, its Python starts and has pip, and that Python is the
# one asked for, where PYTHON was given by hand.
version = $(shell $(1) -Ic 'import pip, sys; print(sys.hexversion)' 2>/dev/null)
HAVE := $(if $(wildcard $(BUSY)),,$(call version,$(PY)))
WANT := $(if $(filter file,$(origin PYTHON)),$(HAVE),$(call version,$(PYTHON)))
USABLE := $(and $(HAVE),$(filter $(HAVE),$(WANT)))

$(call env,%): $(if $(USABLE),,.fresh)
	@$(call check_version,$(PY))
	@echo $$PPID >$(BUSY)
	@[ -d $(@D) ] || rm -rf $(VENV)/.fastgpt-*
	$(PY) -m pip install -c constraints.txt '.$(if $(filter-out core,$*),[$*])'
	@mkdir -p $(@D) && touch $(@D)/core $@ && rm $(BUSY)

# Nothing but an environment is ever removed to make room for one.
.fresh: .python
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call fail,$(PYTHON) has no venv or no ensurepip \
	(Debian and Ubuntu: apt install python3-venv). Or install the dependencies yourself and use VENV=none)
	@[ $(VENV) = .venv ] || [ ! -e $(VENV) ] || [ -e $(VENV)/pyvenv.cfg ] || [ -e $(BUSY) ] \
	|| $(call fail,VENV=$(VENV) exists and is not a virtual environment; choose another)
	@! kill -0 $$(cat $(BUSY) 2>/dev/null) 2>/dev/null \
	|| $(call fail,another make is installing into $(VENV); if none is: rm -r $(VENV))
	@[ ! -e $(VENV) ] || echo "$(VENV) is incomplete, broken or of another Python: making it anew"
	@rm -rf $(VENV) && mkdir -p $(VENV) && echo $$PPID >$(BUSY)
	$(PYTHON) -m venv $(VENV)

endif

# --- targets -----------------------------------------------------------------------------------

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile
	@sed -n 's/^#  / /p' Makefile

setup: $(call env,$(EXTRAS)) ## make the environment and install into it, nothing else
	@echo "ready: $(PY)"

train: $(call env,core) ## train the small default recipe on the built-in corpus
	$(PY) train.py baby $(ARGS)

test: $(call env,dev) ## run the tests that this machine can run, but for the slow ones
	$(PY) -m pytest -q -m "not slow" -n auto --maxprocesses 4 $(ARGS)

test-full: $(call env,dev) ## run all tests that this machine can run
	$(PY) -m pytest -q -n auto --maxprocesses 4 $(ARGS)

parity: $(call env,dev) ## run the tests that need CUDA; each is skipped, and says so, without it
	$(PY) -m pytest -q -rs -m gpu -n auto --maxprocesses 8 --dist loadgroup $(ARGS)

bench: $(call env,core) ## ops and training steps beside peers: a record, docs/benchmarks.md (~3 min)
	$(PY) -m bench $(ARGS)

bench-regress: $(call env,dev) ## are the ops slower than this machine's baseline? (ARGS=--save makes it)
	$(PY) -m bench.regress $(ARGS)

gpu: $(call env,dev) ## all that needs CUDA, under 10 minutes; STAGES="parity bench" OUT=dir FULL=1
	$(PY) -m bench.gpu $(ARGS)

reproduce: $(call env,core) ## train the lecture's systems as published; writes docs/reproduction.md
	$(PY) -m bench.reproduce $(ARGS)

tune: $(call env,core) ## choose attention's tiles on the GPU at hand; ARGS=--static needs none
	$(PY) -m bench.tune $(ARGS)

lint: $(call env,dev) ## check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))"

fmt: $(call env,dev) ## format the code and mend what ruff can mend
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean: ## remove caches and build leftovers; environment, data and runs stay
	rm -rf build fastgpt.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find . -name site-packages -prune -o -name __pycache__ -prune -exec rm -rf {} +
