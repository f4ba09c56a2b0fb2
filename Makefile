# `make mnist` and `make test` need Python 3.10 or later and a C++17 compiler; everything else they install into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORLD_SIZE ?= 2
# The main job needs the package alone; the tests also need MPI and the test tools.
TEST_EXTRAS ?= mpi,plot,test
NATIVE := $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')
SOURCES := pyproject.toml CMakeLists.txt $(NATIVE)

.PHONY: mnist mpi test test-gpu model litmus faults torch torch-quick slurm slurm-quick singa sanitize sanitize-threads lint examples format clean

mnist: $(VENV)/.base
	$(BIN)/python examples/mnist_multiprocess.py $(WORLD_SIZE)

mpi: $(VENV)/.mpi

# The ranks of a test mostly wait for each other, so one worker more than there are cores; 0: in one process.
TEST_WORKERS ?= $(shell expr $$(nproc) + 1)
test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal --durations=20

# On a machine with a GPU. CUDA is that of the driver and of nvcc: 12 or 13.
CUDA ?= 13
test-gpu: $(VENV)/.test-gpu
	$(BIN)/python -m pytest tests/gpu -rs

# The shared-memory protocol, see tests/model/README.md. `model`: every order of steps, with death at every step, of two
# and three ranks; two minutes and 3 GB, of which `make test` does the smaller part. `litmus`: every execution that the
# memory models of C++ and of ARM allow; needs GenMC on the PATH.
model:
	$(PYTHON) -m tests.model.checker
litmus:
	$(PYTHON) -m tests.model.litmus

# Faults of every kind under every backend, at random moments, then what remains of many jobs and collectives; see
# docs/faults.md. 20 minutes on two cores. Two hosts need root.
TRIALS ?= 500
faults: $(VENV)/.test
	$(BIN)/python -m tests.faults --trials $(TRIALS)
	$(BIN)/python -m tests.faults.soak

# Real jobs on a real Slurm of two nodes, both on this machine; see docs/slurm.md. Needs root; installs Debian's packages.
# The first writes docs/slurm-results.md, in 15 minutes; the second is for continuous integration, in one.
slurm: $(VENV)/.slurm
	$(BIN)/python tests/slurm/run
slurm-quick: $(VENV)/.mpi
	$(BIN)/python tests/slurm/run --quick

# PyTorch's own tests of torch.distributed over distopt, against the list of what passes with Gloo; see docs/pytorch.md.
# The first runs both, with 2, 3, 4 and 8 ranks, in a quarter of an hour; the second is for continuous integration.
SUITE := tests/torch/suite.py --expect tests/torch/passes.txt
torch: $(VENV)/.test
	for n in 2 3 4 8; do $(BIN)/python -W ignore tests/torch/suite.py --ranks $$n || exit 1; done
torch-quick: $(VENV)/.test
	$(BIN)/python -W ignore $(SUITE) --backends distopt --ranks 2
	$(BIN)/python -W ignore $(SUITE) --backends distopt --ranks 3

# SINGA's unit tests and example scripts from a checkout of github.com/apache/singa, with their imports renamed; see
# docs/singa.md. Half an hour, and no part of continuous integration. The tests run with the installed NumPy and with 2.3.
singa: $(VENV)/.mpi
	$(if $(CHECKOUT),,$(error name a checkout of github.com/apache/singa: make singa CHECKOUT=FOLDER))
	$(BIN)/python tests/singa/run $(CHECKOUT)
	$(BIN)/python tests/singa/run $(CHECKOUT) --numpy 2.3
	$(BIN)/python tests/singa/scripts $(CHECKOUT)

# The tests of kernels and transports under the address and undefined-behaviour sanitizers, in an environment apart.
SANITIZED ?= tests/unit tests/conformance
sanitize: export SKBUILD_CMAKE_DEFINE = DISTOPT_SANITIZE=address,undefined;DISTOPT_CUDA=OFF
sanitize: export SKBUILD_BUILD_DIR = build/sanitize
sanitize:
	$(MAKE) VENV=.venv-sanitize .venv-sanitize/.test
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	.venv-sanitize/bin/python -m pytest $(SANITIZED)

# The shared-memory communicator under ThreadSanitizer, with its ranks as threads; then with weaker orders, where it must
# find races. Four minutes.
THREADS := build/threads
THREADS_SOURCES := $(wildcard tests/model/threads/*.cpp) csrc/base/isa.cpp csrc/base/fork.cpp $(wildcard csrc/host/*.cpp csrc/shm/*.cpp)
THREADS_FLAGS := -std=c++17 -O1 -g -fsanitize=thread -Wno-tsan -Icsrc -DDISTOPT_ISA=portable -pthread \
	-Wl,--wrap=mmap,--wrap=munmap,--wrap=fcntl
sanitize-threads:
	mkdir -p $(THREADS)
	$(CXX) $(THREADS_FLAGS) $(THREADS_SOURCES) -o $(THREADS)/ranks
	$(THREADS)/ranks 20
	$(CXX) $(THREADS_FLAGS) -include tests/model/threads/weaker.h $(THREADS_SOURCES) -o $(THREADS)/weaker
	! $(THREADS)/weaker 1 2> $(THREADS)/races.txt
	grep -q "ThreadSanitizer: data race" $(THREADS)/races.txt

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

# The commands of README's table, for one epoch.
examples: $(VENV)/.mpi
	$(BIN)/python examples/mnist_multiprocess.py 2 --max-epoch 1
	$(BIN)/mpiexec --hostfile examples/hosts $(BIN)/python examples/mnist_dist.py --max-epoch 1
	$(BIN)/distopt run --nproc-per-node 2 examples/mnist_dist.py --max-epoch 1
	$(BIN)/python examples/mnist_dist.py --max-epoch 1

# Python files are used in place (editable install); a change in csrc/ or the build files builds the extension anew.
# Every install builds it, so one that brings more counts for those that bring less.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.base: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.mpi: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable ".[mpi]"
	touch $@ $(VENV)/.base

$(VENV)/.slurm: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable ".[$(TEST_EXTRAS),oracle,submitit]"
	touch $@ $(VENV)/.base $(VENV)/.mpi $(VENV)/.test

$(VENV)/.test: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable ".[$(TEST_EXTRAS)]"
	touch $@ $(VENV)/.base $(VENV)/.mpi

$(VENV)/.test-gpu: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable ".[$(TEST_EXTRAS),cuda$(CUDA)]"
	touch $@ $(VENV)/.base $(VENV)/.mpi $(VENV)/.test

$(VENV)/.lint: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --editable ".[$(TEST_EXTRAS),dev]"
	touch $@ $(VENV)/.base $(VENV)/.mpi $(VENV)/.test

clean:
	rm -rf $(VENV) .venv-sanitize build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
