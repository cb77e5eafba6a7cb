# Makefile – every chore by name; `make` lists them. Needs a C compiler and Python 3.11 or newer with its headers.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n $(JOBS) --dist worksteal
SLOWEST ?= 10
BENCH_ARGS ?=
COMPILERS ?= gcc clang
FUZZ_ARGS ?= # such as --seed 7 --table
MASK_ARGS ?= # such as --seed 7 --cases 500000 --all-levels
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
PYTEST := $(BIN)/pytest --durations=$(SLOWEST)
SOURCES := $(sort $(shell find csrc include tests/c -name '*.[ch]' -o -name '*.cpp'))

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-frameworks test-frameworks-quick frameworks-quick-installed frameworks frameworks-installed fuzz bench docs wheel lib install-lib lint format stubs faults sanitize tsan werror clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/installed ## install and show what the library does
	@$(BIN)/python -m attnmask
	@echo
	@echo 'Next: $(BIN)/python to try it, `make test` to test this build, `make docs` for the documentation.'

test: $(VENV)/installed $(VENV)/test.txt ## install and run all tests (PYTEST_ARGS='-k cumsum')
	@echo 'attnmask: testing at every instruction set of this processor. `make test-quick` takes a third of the time.'
	@$(PYTEST) $(PYTEST_ARGS)
	@echo 'All tests passed. Next: `make demo`, or `pip install .` to install into an environment of your own.'

test-quick: export ATTNMASK_TEST_LEVELS := turns
test-quick: $(VENV)/installed $(VENV)/test.txt ## the same tests, each at one instruction set
	@$(PYTEST) $(PYTEST_ARGS)

# PyTorch for the CPU alone: PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu'.
test-frameworks: $(VENV)/installed ## run the tests that need PyTorch, transformers, JAX or ejKernel, with all of these
	$(MAKE) --no-print-directory VENV=.venv-frameworks frameworks

# The short ones, with the oldest PyTorch that is supported, where these packages are to be had.
test-frameworks-quick: $(VENV)/installed
	@$(MAKE) --no-print-directory frameworks-quick-installed || \
	    { echo 'no PyTorch or JAX to be had: skipped'; exit 0; }; \
	$(MAKE) --no-print-directory VENV=.venv-frameworks PYTEST_ARGS='-m "not long" $(PYTEST_ARGS)' frameworks

frameworks-quick-installed:
	@$(MAKE) --no-print-directory VENV=.venv-frameworks PIP_ARGS='$(PIP_ARGS) torch==2.13.0' frameworks-installed

frameworks: frameworks-installed # with the package that is built where it lies
	PYTHONPATH=$(CURDIR) $(PYTEST) $(PYTEST_ARGS) tests/torch tests/jax tests/transformers tests/clients tests/ejkernel \
	    tests/sequences/test_padding.py tests/common/test_reprs.py tests/sharded/test_shards.py \
	    tests/common/test_doors.py tests/common/test_versions.py tests/project/test_examples.py \
	    tests/common/test_signatures.py::test_completion_shows_public_names_only \
	    tests/common/test_every_function.py::test_arrays_of_any_form \
	    tests/cache/test_latent.py::test_tensors tests/cache/test_latent.py::test_graphs tests/cache/test_write.py::test_tensors \
	    tests/attention/test_accuracy.py::test_beside_torch

frameworks-installed: $(VENV)/test.txt $(VENV)/frameworks.txt
	@$(MAKE) --no-print-directory $(VENV)/clients.txt || echo 'not all models of tests/clients are to be had'

$(VENV)/clients.txt: $(VENV)/frameworks.txt
$(VENV)/clients.txt: private PIP += --no-deps

fuzz: $(VENV)/installed $(VENV)/test.txt ## compare random calls with dense attention, and call all with hostile arguments
	$(BIN)/python tests/fuzz/calls.py --of masks $(MASK_ARGS)
	$(BIN)/python tests/fuzz/calls.py --of arguments --cases 20000 $(MASK_ARGS)
	$(BIN)/python tests/fuzz --calls 200000 $(FUZZ_ARGS)

bench: $(VENV)/installed $(VENV)/bench.txt ## measure beside other libraries (BENCH_ARGS=--quick)
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script $(BENCH_ARGS) || exit 1; done

docs: $(VENV)/installed $(VENV)/docs.txt ## make the documentation, in build/docs
	@echo 'attnmask: making the documentation, in about a minute'
	@$(BIN)/sphinx-build -W --keep-going --quiet -d build/doctrees -b html docs build/docs
	@echo 'Open build/docs/index.html'

# They need no Python. SANITIZE=address,undefined or thread builds them for a test, DEBUG=1 for a debugger.
lib: ## build the C library, in build/lib: libattnmask for include/attnmask.h
	@$(MAKE) --no-print-directory -j $(JOBS) -f csrc/lib.mk

install-lib: lib ## install the C library with its header (PREFIX=/usr/local, DESTDIR=)
	@$(MAKE) --no-print-directory -f csrc/lib.mk install

# Wheels are made from the source distribution, and tested where neither sources nor a compiler are found. One serves all
# Pythons but free-threaded ones. PYTHONS='path/to/python3.13 ...' takes others than those on PATH.
WHEEL := build/wheel
PYTHONS ?= $(shell for name in $(addprefix python3.,11 12 13 14 14t); do \
    $$name -c 'import os, sys; print(os.path.realpath(sys.executable))' 2> /dev/null; done; true)
wheel: $(VENV)/wheel.txt $(VENV)/test.txt ## build a source distribution and wheels, to dist, and test them with each Python
	rm -rf $(WHEEL) dist
	$(BIN)/python -m build --sdist --outdir dist .
	set -e; for python in $(PYTHONS); do \
	    name=$(CURDIR)/$(WHEEL)/$$(basename $$python); $$python -m venv $$name; \
	    pip="$$name/bin/python -m pip --disable-pip-version-check --quiet"; \
	    $$pip install --no-index --no-deps --find-links dist --only-binary :all: attnmask 2> /dev/null || { \
	        $$pip wheel $(PIP_ARGS) --no-deps --wheel-dir $$name dist/*.tar.gz; \
	        PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist $$name/*.whl; }; \
	    export CC=false PYTHONSAFEPATH=1; \
	    PATH=$$name/bin $$pip install $(PIP_ARGS) --find-links dist --only-binary attnmask attnmask -r $(VENV)/test.txt; \
	    (cd $$name && PATH=bin bin/python -m attnmask > /dev/null); \
	    PATH=$$name/bin $$name/bin/pytest $(PYTEST_ARGS); \
	    unset CC PYTHONSAFEPATH; \
	done

lint: $(VENV)/lint.txt ## check style and format, and the files that other services read
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)
	$(BIN)/shellcheck .ci/run .ci/run_arm
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.readthedocs .readthedocs.yaml

format: $(VENV)/lint.txt ## put C and Python in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

stubs: $(VENV)/installed $(VENV)/lint.txt $(VENV)/test.txt ## check types, and that the stub describes the C module
	$(BIN)/mypy
# Of others: they need theirs; a property in C, a hidden parameter; a default that can be told from 0.
	printf '%s\n' 'attnmask[.]_?(ejkernel|flash_attn|jax|natten|torch|transformers).*' '.*(MaskInfo|Held|ShardPlan)[.](_tensors|apply_sliding_window)' \
	    '.*flash_attention[.](flash_attention_(bwd|fwd|bwd_vjp)|attention_(weights|statistics))' '.*(KVCacheStep|Tokens)[.]attend' '.*[.](write|attention_statistics_with)_kvcache' \
	    | $(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml --allowlist /dev/stdin \
	        --ignore-unused-allowlist attnmask

# Builds other than the installed one live in build/NAME.
BUILD_AS = $(BIN)/python setup.py --quiet build --build-temp build/$(1)/temp --build-lib build/$(1)/lib

werror: $(VENV)/created ## build without a warning, and look for instructions that not every processor has
	for cc in $(COMPILERS); do \
	    command -v $$cc > /dev/null || { echo "$$cc is not installed: skipped"; continue; }; \
	    CC=$$cc ATTNMASK_WERROR=1 $(call BUILD_AS,$$cc) --force || exit 1; \
	    $(BIN)/python .ci/check_isa.py build/$$cc/temp || exit 1; \
	done

FAULTY = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/faults/lib
faults: $(VENV)/installed $(VENV)/test.txt ## let each allocation of many calls fail, those of PyTorch and JAX as well
	CFLAGS=-w ATTNMASK_DEBUG=1 ATTNMASK_FAULTS=1 $(call BUILD_AS,faults)
	$(FAULTY) $(PYTEST) $(PYTEST_ARGS) tests/runtime/test_allocation_faults.py
	@$(MAKE) --no-print-directory VENV=.venv-frameworks frameworks-installed || \
	    { echo 'no PyTorch or JAX to be had: skipped'; exit 0; }; \
	$(FAULTY) .venv-frameworks/bin/pytest tests/runtime/test_allocation_faults.py -k 'pytorch or jax'

# What a target needs beside a compiler: a command that succeeds where it is there, and what to say where it is not.
need = @$(1) || { echo '$(2)' >&2; exit 1; }

# Python itself is not instrumented: the sanitizer's library has to be there first, and libstdc++ for the exceptions
# of other modules. Its own allocator would hide errors from the sanitizer, and leaks at exit are Python's. GCC aligns
# what it puts aside to find uses after a return to 32 bytes, too few for AVX-512.
AFTER_RETURN = $(if $(shell grep -sm1 avx512f /proc/cpuinfo),0,1)
SANITIZED = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/sanitize/lib PYTHONMALLOC=malloc \
    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=$(AFTER_RETURN) \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

sanitize: $(VENV)/installed $(VENV)/test.txt ## run the tests, those of faults as well, under AddressSanitizer and UBSan
	$(call need,test -e "$$(gcc -print-file-name=libasan.so)",make sanitize needs gcc and its sanitizers: apt install gcc)
	CC=gcc ATTNMASK_FAULTS=1 ATTNMASK_SANITIZE=address,undefined $(call BUILD_AS,sanitize)
	$(SANITIZED) $(BIN)/python -c 'import attnmask._core as c; assert "/sanitize/" in c.__file__, c.__file__'
	@$(MAKE) --no-print-directory -s -j $(JOBS) -f csrc/lib.mk CC=gcc SANITIZE=address,undefined LEVELS=baseline
	@# It leaves the sanitizer's report to be seen. mypy, which takes long here, does not call the core.
	ATTNMASK_C_LIBRARY=build/lib-address $(SANITIZED) $(PYTEST) --capture=sys --ignore=tests/common/test_types.py $(PYTEST_ARGS)

# Python is not instrumented, nor is the OpenMP runtime: archer, which comes with LLVM's, tells what it orders. Children of
# processes with threads are beyond the sanitizer.
TSAN = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/tsan/lib LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" \
    OMP_TOOL_LIBRARIES="$$(dirname "$$(readlink -f "$$(command -v clang)")")/../lib/libarcher.so" \
    TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:die_after_fork=0:allocator_may_return_null=1
TSAN_TESTS = tests/runtime/test_threads.py tests/runtime/test_float_mode.py \
    tests/common/test_fuzz.py::test_hostile_calls \
    tests/common/test_promises.py::test_sixteen_callers_get_the_bits_of_one \
    tests/runtime/test_runtime.py::test_calls_from_many_python_threads \
    'tests/runtime/test_runtime.py::test_a_signal_ends_a_long_call[attention]' \
    'tests/runtime/test_runtime.py::test_a_signal_ends_a_long_call[mask]' \
    -k 'not fork and not child and not multiprocessing'

tsan: $(VENV)/installed $(VENV)/test.txt ## look for races in the tests of threads (clang, libomp)
	$(call need,command -v clang > /dev/null,make tsan needs clang and its OpenMP: apt install clang libomp-dev)
	$(call need,test -e "$$(gcc -print-file-name=libtsan.so)",make tsan needs the sanitizers of gcc: apt install gcc)
	CC=clang ATTNMASK_SANITIZE=thread $(call BUILD_AS,tsan)
	$(TSAN) $(BIN)/python -c 'import attnmask; assert "LLVM" in attnmask.show_config("dict")["openmp"]'
	$(TSAN) ARCHER_OPTIONS=verbose=1 $(BIN)/python -c 'import attnmask' 2>&1 | grep -q 'Archer detected'
	$(TSAN) $(PYTEST) --capture=sys $(TSAN_TESTS) $(PYTEST_ARGS) # which leaves the report to be seen

clean: ## remove all that was made
	rm -rf $(VENV) .venv-frameworks build dist *.egg-info attnmask/*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/created: # with what pyproject.toml asks for to build, so that a rebuild needs no new environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'attnmask needs Python 3.11 or newer, and $(PYTHON) is none: make PYTHON=python3.12' >&2; exit 1; }
	@echo 'attnmask: making $(VENV), and downloading NumPy and setuptools'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) 'setuptools>=77' 'numpy>=2.0'
	@touch $@

# Built by setup.py, which says how far it is and how long it may take; pip would show nothing of that.
$(VENV)/installed: $(VENV)/created $(SOURCES) setup.py pyproject.toml # Python code is used where it is
	@$(BIN)/python setup.py --quiet check_tools
	@$(BIN)/python setup.py --quiet build_ext --inplace --build-temp build/editable
	@$(PIP) --no-build-isolation --editable .
	@touch $@

GROUP = import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]], sep="\n")

$(VENV)/%.txt: $(VENV)/created pyproject.toml # the packages of one group
	@echo 'attnmask: downloading what `make $*` needs'
	@$(BIN)/python -c '$(GROUP)' $* > $@.new
	@$(PIP) -r $@.new
	@mv $@.new $@
