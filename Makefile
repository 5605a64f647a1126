# make digits   train the example network        make test       the tests' first tier: minutes
# make lint     check style                      make test-rest  the cases that it leaves out, or PART=2/4 of them
# make format   put it right                     make test-all   all tests, compiled as XLA compiles by default
# make bench    ours against XLA                 make typecheck  mypy and pyright on a user's program
# make docs     the site, in build/docs          make wheel      build the wheels, try them in empty environments
# make clean    remove builds                    make sanitize   the native code under ASan and UBSan, called by hostile hands
# make tsan     the same from several threads, under ThreadSanitizer
# make mutants  64 small defects, each of which the tests must find
# make libraries   accelerate, freeze and enable on Haiku's, Equinox's, Keras's, AQT's layers, Flax's examples
# make fuzz     random cases of every property: MINUTES=15 SEED=7
# make foreign  other projects' tests with jaxconv.enable on: SUITES=paths
# make test-matrix   what depends on the versions, with each supported Python and JAX; exports across them
#
# Everything lives in $(VENV), made on first use. PYTHON names the interpreter (3.11 to 3.13), ARGS is passed on:
#   make digits ARGS=--compare        make test ARGS="-k dgrad"        make bench ARGS="--help"
# JAXCONV_CUDA=ON or OFF forces or refuses the CUDA module; without it, it is built where there are a GPU and an nvcc.

VENV ?= .venv
ifneq ($(words $(VENV)),1)
  $(error VENV=$(VENV) must be a path without spaces; the folder of the checkout may have them)
endif
ARGS ?=
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(IN_RANGE)' 2>/dev/null && { echo $$p; exit; }; done; echo python3)
VENV_PYTHON := $(VENV)/bin/python

# --- what this machine has
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
ifeq ($(GPU),yes)
  export JAXCONV_CUDA ?= AUTO
  # Test workers share the GPU: none may take its memory in advance.
  export XLA_PYTHON_CLIENT_PREALLOCATE ?= false
  WORKERS ?= 4
  cuda := ,cuda13
else
  # On a machine without a GPU nobody waits for nvcc; JAXCONV_CUDA=ON asks for it.
  export JAXCONV_CUDA ?= OFF
  WORKERS ?= auto
  cuda :=
endif
# nvcc is most of the build: all cores for it.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

# --- installing
# The installation is editable, so Python edits need none, and not isolated, so that C++ edits recompile what they touch.
# Then pip does not provide what the build asks for: `requirements` prints it from pyproject.toml.
requirements = $(VENV_PYTHON) .ci/environment.py needs
# Headers that the kernels' domains include: _cpu is made of them too.
DOMAINS := $(wildcard cuda/core/*.h cuda/gemm/*.h cuda/conv/*/*.h)
# Folders of Python code stand for their lists of files, which the editable installation holds.
SOURCES := pyproject.toml CMakeLists.txt $(shell find common cpu ffi -type f) $(shell find cuda -name '*domain.*') $(DOMAINS) $(shell find jaxconv jaxconv_plugin -type d -not -name __pycache__)
ifneq ($(JAXCONV_CUDA),OFF)
  SOURCES += $(shell find cuda -type f)
endif
PIP := $(VENV_PYTHON) -m pip --disable-pip-version-check
INSTALL_LOG := $(VENV)/install.log
# Of its own: an isolated `pip install .` has other paths, and would make everything compile again.
BUILD := build/make-{wheel_tag}

# What stamps say is installed: the package with extras, and what the commands below need beside it
of_examples := examples$(cuda)
of_test := test,flax,examples,bench$(cuda)
tools := dev docs typing release libraries
# A stamp that no longer holds goes, before anything is made: somebody may have uninstalled a package or moved the folder.
ifneq ($(filter-out help clean,$(or $(MAKECMDGOALS),help)),)
  LOST := $(shell [ ! -e $(VENV)/venv.stamp ] || $(VENV_PYTHON) .ci/environment.py check $(VENV) \
	examples=$(of_examples) test=$(of_test) build $(tools) || rm -f $(VENV)/*.stamp)
endif

# $(call install,extras): the log holds what nvcc says of each kernel's registers; on failure its end is shown.
define install
	@echo "installing jaxconv[$(1)] into $(VENV) (JAXCONV_CUDA=$(JAXCONV_CUDA); log: $(INSTALL_LOG))"
	@$(PIP) install -v --no-build-isolation --config-settings=build-dir='$(BUILD)' -e '.[$(1)]' >$(INSTALL_LOG) 2>&1 || { \
		grep -nE 'error|Error|FAILED' $(INSTALL_LOG) | head -30; tail -30 $(INSTALL_LOG); \
		echo "installing failed; the whole log is $(INSTALL_LOG)" >&2; exit 1; }
endef

$(VENV)/venv.stamp:
	@"$(PYTHON)" -c '$(IN_RANGE)' || { echo "jaxconv needs Python 3.11 to 3.13; $(PYTHON) is" \
		"$$("$(PYTHON)" -V 2>&1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@[ -x $(VENV_PYTHON) ] || rm -f $(VENV)/bin/python*  # links to an interpreter that is gone stay otherwise
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/build.stamp: $(VENV)/venv.stamp pyproject.toml
	@echo "installing what the build needs into $(VENV)"
	@$(PIP) install -q -r <($(call requirements) build) $(if $(cuda),-r <($(call requirements) cuda13) -r <($(call requirements) nvcc))
	@touch $@

# Rewritten when the choice changes, so that a changed one builds again.
cuda_choice = $(JAXCONV_CUDA) $(JAXCONV_CUDA_ARCHS) $(JAXCONV_CUDA_ARCHS_GENERAL)
$(VENV)/cuda.stamp: $(VENV)/venv.stamp FORCE
	@echo '$(cuda_choice)' | cmp -s - $@ || echo '$(cuda_choice)' >$@

$(VENV)/examples.stamp: $(VENV)/build.stamp $(VENV)/cuda.stamp $(SOURCES)
	$(call install,$(of_examples))
	@touch $@

$(VENV)/test.stamp: $(VENV)/build.stamp $(VENV)/cuda.stamp $(SOURCES)
	$(call install,$(of_test))
	@touch $@ $(VENV)/examples.stamp

$(tools:%=$(VENV)/%.stamp): $(VENV)/%.stamp: $(VENV)/venv.stamp pyproject.toml
	@$(PIP) install -q -r <($(call requirements) $*)
	@touch $@

# --- the commands
.PHONY: help install digits test test-rest test-all typecheck wheel bench docs sanitize tsan mutants fuzz foreign libraries \
	test-matrix lint format clean FORCE

help:
	@sed -n '1,/^#$$/s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

install: $(VENV)/test.stamp

digits: $(VENV)/examples.stamp
	$(VENV_PYTHON) examples/digits.py $(ARGS)

# Which tests each of the three runs: tests/tiers.py. Three quarters of their time are XLA's, compiling small programs for
# the CPU: it keeps them in $(VENV) (tests/conftest.py), and need not optimise what runs once. `test-all` measures XLA as
# users have it.
PART ?= 1/1
test test-rest: export JAXCONV_TESTS := $(if $(filter yes,$(GPU)),,quick)
test-rest: tier := --rest=$(PART)
test-all: tier := --all
test test-rest test-all: $(VENV)/test.stamp
	$(VENV_PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(tier) $(ARGS)

# Files or folders of tests in checkouts of JAX, Flax, ...: make foreign SUITES="../jax/tests/lax_test.py" ARGS="-k Conv"
foreign: $(VENV)/test.stamp
	$(VENV_PYTHON) tests/foreign.py $(SUITES) $(ARGS)

# Models that nobody here wrote. FLAX names a checkout of Flax, whose package has no examples; else one is made.
FLAX ?= build/flax
LIBRARY_TESTS := tests/test_accelerate_libraries.py tests/test_accelerate_integers.py tests/test_flax_examples.py \
	tests/test_enable_programs.py tests/test_guide.py tests/test_freeze.py tests/test_freeze_training.py \
	tests/test_freeze_numbers.py
libraries: export JAXCONV_FLAX := $(FLAX)
libraries: export KERAS_BACKEND := jax
libraries: export JAXCONV_TESTS := $(if $(filter yes,$(GPU)),,quick)
libraries: $(VENV)/test.stamp $(VENV)/libraries.stamp
	@test -d $(FLAX)/examples || git clone -q --depth 1 https://github.com/google/flax $(FLAX) || \
		echo "no checkout of Flax: its examples are left out"
	$(VENV_PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(ARGS) $(LIBRARY_TESTS)

typecheck: $(VENV)/test.stamp $(VENV)/typing.stamp
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -m basedpyright

wheel: $(VENV)/release.stamp
	$(VENV_PYTHON) .ci/wheels.py $(ARGS)

bench: $(VENV)/test.stamp
	$(VENV_PYTHON) -m benchmarks $(ARGS)

# Warnings are errors: a link that leads nowhere, a public name without an entry.
docs: $(VENV)/test.stamp $(VENV)/docs.stamp
	$(VENV_PYTHON) -m sphinx -q -E -W --keep-going -b html docs build/docs $(ARGS)
	@echo "build/docs/index.html"
# A build of its own, installed into a folder of its own; -S keeps the environment's editable installation out of the way.
# SANITIZE_TESTS and ARGS choose what runs, JAXCONV_ROUNDS=20 and JAXCONV_SEED=7 make more and other random calls.
SANITIZED := build/sanitize
SANITIZE_TESTS ?= tests/test_wire.py tests/test_operand_checks.py tests/test_hostile_calls.py tests/test_cpu_thresholds.py
sanitize: $(VENV)/test.stamp
	@echo "building _cpu with sanitizers into $(SANITIZED) (log: $(SANITIZED).log)"
	@mkdir -p build && JAXCONV_CUDA=OFF $(PIP) install -v --no-build-isolation --no-deps --upgrade --target $(SANITIZED)/site \
		--config-settings=build-dir=$(SANITIZED)/cmake --config-settings=cmake.build-type=RelWithDebInfo \
		--config-settings=install.strip=false --config-settings=cmake.define.JAXCONV_SANITIZE=address,undefined . \
		>$(SANITIZED).log 2>&1 || { tail -30 $(SANITIZED).log; exit 1; }
	JAX_PLATFORMS=cpu ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
		UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$(SANITIZED)/site:$$($(VENV_PYTHON) -c \
		'import sysconfig; print(sysconfig.get_path("platlib"))')" \
		$(VENV_PYTHON) -P -S -m pytest -p no:cacheprovider --capture=sys --junitxml=$(SANITIZED).xml \
		--deselect tests/test_cpu_thresholds.py::test_bits_do_not_depend_on_the_number_of_threads $(ARGS) $(SANITIZE_TESTS)

# Ten minutes of two cores. ARGS="gemm" takes those that have the word in their names, --page docs/contributing/mutants.md
# writes the outcome down.
mutants: export JAXCONV_TESTS := quick
mutants: $(VENV)/test.stamp
	$(VENV_PYTHON) tests/mutants.py $(ARGS)

# One program calls several kernels from several threads. XLA's thread pool is not instrumented: its threads are replaced
# by threads of ours (ffi/handlers.cc). Addresses are not randomised: the run-time wants them where it expects them.
TSAN := build/tsan
TSAN_TESTS ?= tests/test_threads.py
tsan: $(VENV)/test.stamp
	@echo "building _cpu with ThreadSanitizer into $(TSAN) (log: $(TSAN).log)"
	@mkdir -p build && JAXCONV_CUDA=OFF $(PIP) install -v --no-build-isolation --no-deps --upgrade --target $(TSAN)/site \
		--config-settings=build-dir=$(TSAN)/cmake --config-settings=cmake.build-type=RelWithDebInfo \
		--config-settings=install.strip=false --config-settings=cmake.define.JAXCONV_SANITIZE=thread . \
		>$(TSAN).log 2>&1 || { tail -30 $(TSAN).log; exit 1; }
	JAX_PLATFORMS=cpu JAXCONV_ROUNDS=$(or $(ROUNDS),3) TSAN_OPTIONS="ignore_noninstrumented_modules=1 exitcode=66" \
		LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libtsan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
		PYTHONPATH="$(TSAN)/site:$$($(VENV_PYTHON) -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
		setarch -R $(VENV_PYTHON) -P -S -m pytest -p no:cacheprovider --capture=sys --junitxml=$(TSAN).xml $(ARGS) $(TSAN_TESTS)

# Cases of tests/properties.py, on the CPU or a GPU; ends with an error where one failed, each with its line.
MINUTES ?= 5
SEED ?= 0
fuzz: $(VENV)/test.stamp
	@mkdir -p build
	$(VENV_PYTHON) -P tests/fuzz.py --minutes $(MINUTES) --seed $(SEED) --record build/fuzz.json $(ARGS)

# Wheels, environments and what came of them: build/matrix. ARGS="--jax 0.12 --pythons 3.13" makes it smaller.
test-matrix: $(VENV)/test.stamp
	$(VENV_PYTHON) -P tests/matrix.py --record build/matrix/record.json $(ARGS)

CPP = $(shell find common cpu cuda ffi -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')

# Not the environment's scripts: their first lines name the folder in which they were installed.
clang_format := $(VENV_PYTHON) -c 'import clang_format; clang_format.clang_format()'

lint: $(VENV)/dev.stamp
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	@echo "clang-format --dry-run --Werror (all of common cpu cuda ffi)"
	@$(clang_format) --dry-run --Werror $(CPP)

format: $(VENV)/dev.stamp
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .
	@$(clang_format) -i $(CPP)

clean:
	rm -rf build dist $(VENV) examples/output
