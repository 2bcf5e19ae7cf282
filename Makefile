# make demo   trains and compares two recommenders on movie ratings (about two minutes)
# make docs   builds the documentation into build/site
# make test   checks the style and the types, runs the tests; make check adds the tests that take longer
# Each sets up .venv on its first run. The other targets are for working on fastcl itself.

TORCH ?= 2.13.0
PYTHON ?= python3

BIN := .venv/bin
# Python compiles a module when it is first imported; compiling all that torch has would take longer than its download.
INSTALL := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input install --no-compile
# Two test files at a time. Their threads share the cores, so one that waits must not spin.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder
CXX_FILES := $(shell find csrc tests benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')
# Folders too, so that a deleted source counts as a change.
BUILD_INPUTS := setup.py pyproject.toml $(shell find csrc building -not -name '*.pyc' -not -name __pycache__)

.PHONY: demo docs test check wheels check-wheels build lint style types suite suite-check format stubs bench clean

demo: .venv/fastcl-recsys
	$(BIN)/fastcl demo --data movies

# -E: pages are generated from the code too, so that nothing of an earlier build may stay.
docs: .venv/fastcl-docs
	$(BIN)/python -m sphinx -W --keep-going -q -E -j auto -b html docs build/site
	@echo "build/site/index.html"

# The types are checked beside the tests, since mypy uses one core.
test: style
	@$(MAKE) --no-print-directory --jobs=2 types suite

check: style $(patsubst %,.venv/fastcl-%,compat onnx tensorboard mlflow wandb)
	@$(MAKE) --no-print-directory --jobs=2 types suite-check

# The wheels of all platforms, built on this one, twice to compare the bytes, and checked: into dist/.
wheels: .venv/fastcl-release
	$(BIN)/python -m building.wheels --twice

# Installs the wheels in dist/ where they can run here and runs the losses' tests there; goes on where it was stopped.
# PYTHONS, EMULATED: NAME=COMMAND of other Pythons that have pip, torch, pytest, hypothesis and safetensors, with ;
# between them; building/try_wheels.py tells more.
check-wheels: .venv/fastcl-release
	IFS=';'; set --; for command in $$PYTHONS; do set -- "$$@" --python "$$command"; done; \
		for command in $$EMULATED; do set -- "$$@" --emulated "$$command"; done; \
		$(BIN)/python -m building.try_wheels "$$@"

suite: .venv/fastcl-test
	$(PYTEST)

suite-check: .venv/fastcl-test
	$(PYTEST) -m "slow or not slow" --hypothesis-profile=thorough

build: .venv/fastcl-test

lint: style types

style: .venv/fastcl-test
	$(BIN)/ruff check
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python -m benchmarks.tables --check

types: .venv/fastcl-test
	$(BIN)/mypy

format: .venv/fastcl-test
	$(BIN)/ruff check --fix
	$(BIN)/clang-format -i $(CXX_FILES)

# The stubs that type checkers and editors read, from the registry of the losses.
stubs: .venv/fastcl-test
	$(BIN)/python tests/stubs.py

bench: .venv/fastcl-test
	$(BIN)/python -m benchmarks.bench_overhead --repeats 5
	$(BIN)/python -m benchmarks.bench_contrast --repeats 5 --only clrec,moco,batch,beauty,small,tiny,bf16-64,ids,bias \
		--against products,plain,reference,lean,chunked,"torch lce"
	$(BIN)/python -m benchmarks.bench_memory --only moco,wide
	$(BIN)/python -m benchmarks.bench_scaling --repeats 3 --only moco,batch --columns 1000,10000,100000
	command -v valgrind >/dev/null && $(BIN)/python -m benchmarks.count_instructions --output build/instructions.json || \
		echo "valgrind is not installed: instructions are not counted"

clean:
	rm -rf .venv build dist fastcl.egg-info fastcl/*.so fastcl/*.dylib fastcl/*.dll .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Stamps. Another TORCH replaces the one installed; its stamp goes with it.
.venv/torch-$(TORCH):
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==$(TORCH)
	rm -f .venv/torch-*
	touch $@

# Python files need no new install (it is editable); the extension and the metadata do.
.venv/fastcl-%: .venv/torch-$(TORCH) $(BUILD_INPUTS)
	$(INSTALL) --editable '.[$*]'
	touch $@

.venv/fastcl-test: export FASTCL_WERROR = 1
