# Every target does all of its own set-up; stamps under build/ keep a second run quick. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
.NOTPARALLEL:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
DEMO := $(CURDIR)/.venv-demo
OPENMPI := $(CURDIR)/.venv-openmpi
PACKAGING := $(CURDIR)/build/packaging
# On Linux zig is the linker, so that the wheel runs with the C library of 2014 and later.
MANYLINUX := $(if $(filter Linux,$(shell uname -s)),--zig --compatibility manylinux2014)
SOFTWARE_CUDA := -std=c++17 -O2 -fPIC -shared -Wall -Wextra -Werror
NEXTEST_PROFILE := $(if $(CI),ci,default)

# The wheel and the workspace are built with one configuration, so that neither builds over what the other built.
export PYO3_BUILD_EXTENSION_MODULE := 1
export PYO3_PYTHON := $(BIN)/python
# Mesa's drivers print where there is none.
export XDG_RUNTIME_DIR ?= $(CURDIR)/build
export CARGO_TERM_COLOR ?= auto
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_QUIET := 1
# Exact versions, for every pip that runs here.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

PY_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi') pyproject.toml
RUST_SOURCES := $(shell find crates -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock

##@ What users and CI run

.PHONY: help
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: build/demo.stamp ## train a convolution network on handwritten digits with the command, then with a loop, with a release wheel in its own environment
	$(DEMO)/bin/python examples/digits_files.py build/digits
	rm -rf build/digits/run
	$(DEMO)/bin/ortrain train examples/convnet.onnx --data build/digits/train.npz --val build/digits/val.npz --epochs 10 --lr 0.003 --schedule cosine --out build/digits/run
	$(DEMO)/bin/python examples/digits_files.py build/digits --check
	$(DEMO)/bin/python examples/finetune_digits.py build/digits
	$(DEMO)/bin/python examples/finetune_digits_orttrainer.py build/digits_orttrainer
	@echo "report of the command: $(CURDIR)/build/digits/run/report.html"

.PHONY: test
test: $(addprefix timed-,fmt lint rust doctest pytest stubs types ruff docs demo) ## everything that CI runs, with the seconds of each target

timed-%:
	@start=$$(date +%s); $(MAKE) --no-print-directory $*; code=$$?; \
	echo "make $*: $$(( $$(date +%s) - start )) s"; exit $$code

.PHONY: wheel
wheel: build/packaging.stamp ## dist/: the sdist, and the wheel that is built from it, installed beside NumPy alone in an environment of each Python at hand
	rm -rf dist build/sdist
	@mkdir -p build/sdist
	$(PACKAGING)/bin/maturin sdist --out dist
	tar -xzf dist/ortrain-*.tar.gz -C build/sdist
	zig=$$($(PACKAGING)/bin/python -c "import os, ziglang; print(os.path.dirname(ziglang.__file__))"); \
	env -u PYO3_PYTHON PATH="$$zig:$$PATH" CARGO_TARGET_DIR="$(CURDIR)/target/wheel" MATURIN_PEP517_ARGS="$(MANYLINUX)" \
	  $(PACKAGING)/bin/python -m pip wheel --no-deps --wheel-dir dist build/sdist/ortrain-*
	env -u PIP_CONSTRAINT $(PACKAGING)/bin/python tests/check_wheel.py dist

.PHONY: docs
docs: build/docs.stamp ## build/docs: the pages and the reference of every public name as a site; a link that leads nowhere is an error
	$(BIN)/python docs/site/build.py build/docs

.PHONY: bench
bench: build/demo.stamp ## what the machine allows; kernels beside it; import and step times of the release wheel
	cargo bench --package ortrain-kernels --bench limits
	cargo bench --package ortrain-kernels --bench kernels
	cargo bench --package ortrain --bench steps
	$(DEMO)/bin/python benches/steps.py
	$(DEMO)/bin/python benches/fit.py

.PHONY: compare
compare: build/demo.stamp ## the release wheel's step, memory and start beside onnxruntime-training's, PyTorch's and jax's, and a step of each optimizer beside PyTorch's; ARGUMENTS="mlp --rounds 5" for the former alone
	$(DEMO)/bin/python benches/compare.py $(ARGUMENTS)
	$(if $(ARGUMENTS),,$(DEMO)/bin/python benches/optimizers.py)

.PHONY: conform
conform: build/wheel.stamp build/demo.stamp build/openmpi.stamp build/nextest.stamp build/cuda.stamp $(if $(UPSTREAM)$(ONNXCUSTOM),build/upstream.stamp) ## recorded runs, node tests, onnxruntime-training, jax, PyTorch, architectures of transformers and timm, Keras, Flower, trained models out of packages, decoders of onnxruntime-genai, files of onnxruntime's quantizer, 24 000 changed files, ranks on Open MPI, 2 GB checkpoints and models, 10 000 random graphs with the release wheel, functions over all f32, CUDA kernels for more architectures and with NVRTC 12.9, the check of a GPU on the software driver, the Rust tests without each optional pass; UPSTREAM=FOLDER: the tests of onnxruntime-training; ONNXCUSTOM=FOLDER: those of onnxcustom
	$(BIN)/python -m pytest tests/test_replay.py tests/test_oracle.py tests/test_optimizer_exchange.py tests/test_nodes.py
	ORTRAIN_CONFORM=1 $(BIN)/python -m pytest tests/test_trainer_schedules.py tests/test_trainer_scalers.py tests/test_trainer_checkpoint_storage.py tests/test_writers.py tests/test_half_gradients.py tests/test_fit_resume.py
	$(BIN)/python -m pytest -rP --durations=0 tests/conform
	ORTRAIN_ALL_F32=1 cargo test --release --package ortrain-kernels --lib -- --nocapture vecmath
	ORTRAIN_CONFORM=1 cargo test --package ortrain-cuda --test nvrtc
	$(BIN)/python -m pip install --quiet --upgrade --target build/nvrtc12 nvidia-cuda-nvrtc-cu12
	ORTRAIN_CUDA_LIBRARIES=$(CURDIR)/build/nvrtc12/nvidia/cuda_nvrtc/lib ORTRAIN_CONFORM=1 \
	  cargo test --package ortrain-cuda --test nvrtc
	PYTHON=$(BIN)/python benches/gpu_check.sh pack
	PYTHON=$(BIN)/python OUT=build/gpu-check/results benches/gpu_check.sh --software
	$(if $(UPSTREAM),$(BIN)/python tests/upstream/run.py "$(UPSTREAM)" build/upstream-wheel/*.whl)
	$(if $(ONNXCUSTOM),$(BIN)/python tests/suite_of_onnxcustom/run.py "$(ONNXCUSTOM)" build/upstream-wheel/*.whl)

.PHONY: pin
pin: build/wheel.stamp ## bits of losses, parameters and results of every workload and case: the first run writes build/pin.json, others compare with it
	$(BIN)/python benches/pin.py build/pin.json $(ARGUMENTS)

.PHONY: mutants
mutants: build/wheel.stamp build/nextest.stamp build/mutants.stamp ## thirty small mistakes in the passes, each of which a test must catch; some minutes each; ARGUMENTS="--count 5 --seed 7"
	$(BIN)/python tests/mutants.py $(ARGUMENTS)

##@ The inner loop

.PHONY: check
check: ## compile the core, nothing else
	cargo check

.PHONY: fmt
fmt: ## rustfmt, as a check
	cargo fmt --check

.PHONY: lint
lint: build/venv.stamp ## clippy; a warning is an error
	cargo clippy --workspace --all-targets -- -D warnings

.PHONY: rust
rust: build/venv.stamp build/nextest.stamp build/vulkan.stamp build/cuda.stamp ## tests of the Rust crates
	cargo nextest run --workspace --profile $(NEXTEST_PROFILE)

.PHONY: doctest
doctest: ## examples in the documentation of the Rust crates
	cargo test --doc --quiet --features ortrain/wgpu,ortrain/cuda

.PHONY: pytest
pytest: build/wheel.stamp build/vulkan.stamp build/cuda.stamp ## tests of the Python face, a file at a time on each core
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile
	ORTRAIN_TEST_DEVICE=cuda ORTRAIN_CUDA_LIBRARIES=$(CURDIR)/build/cuda ORTRAIN_CUDA_CACHE= \
	  SOFTWARE_NVRTC_CACHE=$(CURDIR)/build/cuda/modules \
	  $(BIN)/python -m pytest --numprocesses auto --dist loadfile tests/test_devices.py tests/test_replay.py tests/test_buffers.py

.PHONY: stubs
stubs: build/wheel.stamp ## the stubs describe the extension module
	$(BIN)/stubtest ortrain --mypy-config-file pyproject.toml --allowlist tests/stubs_allowed.txt

.PHONY: types
types: build/wheel.stamp ## mypy --strict; pyright in strict mode on a user's script
	$(BIN)/python -m mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: ruff
ruff: build/wheel.stamp ## lint and layout of the Python code
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.PHONY: fix
fix: build/wheel.stamp ## rustfmt and ruff, in place
	cargo fmt
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: operators
operators: build/wheel.stamp ## docs/operators.md, from what the operators say of themselves
	$(BIN)/python tests/operators_page.py

.PHONY: optimizers
optimizers: build/wheel.stamp ## the classes of ortrain.optim and the table of docs/optimizers.md, from the table of optimizers
	$(BIN)/python tests/optimizers_page.py

.PHONY: commands
commands: build/wheel.stamp ## the forms of data and the flags in docs/commands.md, from the options of the commands
	$(BIN)/python tests/commands_page.py

.PHONY: internals
internals: build/wheel.stamp ## the printed stages and the drawings of docs/internals.md
	$(BIN)/python tests/internals_page.py

.PHONY: clean
clean: ## remove environments, build/ and dist/ (not target/)
	rm -rf build dist $(VENV) $(DEMO) $(OPENMPI)

build/venv.stamp: constraints.txt
	@mkdir -p build
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install maturin
	touch $@

build/docs.stamp: build/wheel.stamp
	$(BIN)/python -m pip install $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	touch $@

build/packaging.stamp: constraints.txt
	@mkdir -p build
	[ -x $(PACKAGING)/bin/python ] || $(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install maturin ziglang
	touch $@

build/nextest.stamp:
	@mkdir -p build
	cargo nextest --version >/dev/null 2>&1 || cargo install cargo-nextest --locked
	touch $@

# A Vulkan driver that computes on the processor: the tests of ortrain-wgpu run on it.
build/vulkan.stamp:
	@mkdir -p build
	found=$$(ls /usr/share/vulkan/icd.d/lvp_icd*.json /etc/vulkan/icd.d/lvp_icd*.json 2>/dev/null || true); \
	if [ -z "$$found" ] || ! ldconfig -p | grep -q libvulkan.so.1; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends mesa-vulkan-drivers libvulkan1 >/dev/null; \
	  else \
	    echo "The tests of ortrain-wgpu need a Vulkan driver that computes on the processor; on Debian the packages" \
	      "mesa-vulkan-drivers and libvulkan1 have it. Install them, or run make as root." >&2; exit 1; \
	  fi; \
	fi
	touch $@

# CUDA's libraries in C++, which compute on the processor, and NVIDIA's compiler, which needs no GPU: for the tests of
# ortrain-cuda.
build/cuda.stamp: build/venv.stamp $(wildcard crates/ortrain-cuda/tests/driver/*)
	@mkdir -p build/cuda/modules
	@command -v g++ >/dev/null || { echo "The tests of ortrain-cuda need the C++ compiler g++; on Debian the package g++" \
	  "has it." >&2; exit 1; }
	cd crates/ortrain-cuda/tests/driver && \
	g++ $(SOFTWARE_CUDA) -Wl,-soname,libcuda.so driver.cpp lanes.cpp -ldl -o $(CURDIR)/build/cuda/libcuda.so.1 && \
	g++ $(SOFTWARE_CUDA) -Wl,-soname,libnvrtc.so nvrtc.cpp -ldl -o $(CURDIR)/build/cuda/libnvrtc.so.13 && \
	g++ $(SOFTWARE_CUDA) -Wl,-soname,libcublasLt.so cublaslt.cpp $(CURDIR)/build/cuda/libcuda.so.1 \
	  -o $(CURDIR)/build/cuda/libcublasLt.so.13 && \
	cp cuda_language.h $(CURDIR)/build/cuda/
	$(BIN)/python -m pip install nvidia-cuda-nvrtc
	touch $@

build/mutants.stamp:
	@mkdir -p build
	cargo mutants --version >/dev/null 2>&1 || cargo install cargo-mutants --locked
	touch $@

# The development profile: the crates are those that the Rust tests have built already.
build/wheel.stamp: build/venv.stamp $(RUST_SOURCES) $(PY_SOURCES)
	VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --quiet --extras test
	touch $@

# What the tests of other projects use, in environments of their own.
build/upstream.stamp: build/wheel.stamp
	rm -rf build/upstream-wheel
	VIRTUAL_ENV=$(VENV) $(BIN)/maturin build --quiet --interpreter $(BIN)/python --out build/upstream-wheel
	touch $@

# The demo stands alone: an environment of its own, in which the wheel is built, installed and used.
build/release.stamp: constraints.txt $(RUST_SOURCES) $(PY_SOURCES)
	@mkdir -p build
	[ -x $(DEMO)/bin/python ] || $(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install maturin
	rm -rf build/wheels
	env -u PYO3_PYTHON $(DEMO)/bin/maturin build --release --quiet --interpreter $(DEMO)/bin/python --out build/wheels
	touch $@

build/demo.stamp: build/release.stamp
	$(DEMO)/bin/python -m pip install "$$(echo build/wheels/*.whl)[demo,trainer]"
	$(DEMO)/bin/python -m pip install --no-deps --force-reinstall build/wheels/*.whl
	touch $@

# The test environment has MPICH.
build/openmpi.stamp: build/release.stamp
	[ -x $(OPENMPI)/bin/python ] || $(PYTHON) -m venv $(OPENMPI)
	$(OPENMPI)/bin/python -m pip install openmpi pytest scikit-learn "$$(echo build/wheels/*.whl)[trainer,mpi]"
	$(OPENMPI)/bin/python -m pip install --no-deps --force-reinstall build/wheels/*.whl
	touch $@
