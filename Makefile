# Two commands for a fresh machine with python3 (3.11 or newer, with venv): `make train` and `make test`.
PYTHON ?= python3
WORKDIR ?= runs/quickstart
BIN := .venv/bin

.PHONY: help train test test-install test-slow test-targets test-device lint docs gpu-kit clean

help:
	@echo "make train    creates .venv (1.2 GB), trains a small model in minutes, and prints its test perplexity"
	@echo "make test     creates .venv and runs every test but the slow ones"
	@echo "make test-install   runs the tests that break first: mypy, and a wheel installed in an environment of its own"
	@echo "make test-slow   runs the slow tests: they train for minutes, or show for another model what quicker ones show"
	@echo "make test-targets PYTHON=python3.12   creates .venv-targets (3 GB) and compiles for GPUs and TPUs that are not here"
	@echo "make test-device   compares an update of every kind of model on the GPU or TPU that .venv's JAX finds with that of the CPU"
	@echo "make docs     creates .venv and builds the pages and the reference as a site in docs/_build"
	@echo "make gpu-kit DATA=DIR   packs what a GPU machine without a network lacks to run benchmarks.gpu"
	@echo "make lint     checks the style of the code"
	@echo "make clean    deletes .venv; runs stay"
	@echo "PYTHON=python3.12 names another Python for .venv, WORKDIR=runs/mine another place for the run of make train."

train: .venv/installed
	$(BIN)/python train.py --config=configs/quickstart.py --workdir=$(WORKDIR)
	$(BIN)/python evaluate.py --workdir=$(WORKDIR) --split=test
	@echo
	@echo "The run is in $(WORKDIR). Next, as in README.md:"
	@echo "    . .venv/bin/activate"
	@echo "    python evaluate.py --workdir=$(WORKDIR) --split=test --window=64 --context=48"

test: .venv/tested
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -rfEs -m "not slow" -n auto --dist loadfile --no-loadscope-reorder

test-install: .venv/tested
	$(BIN)/python -m pytest -q -rfEs -n 2 tests/test_install.py tests/test_typing.py

test-slow: .venv/tested
	$(BIN)/python -m pytest -q -rfEs -m slow -n auto --dist loadfile

# An environment of its own: JAX finds the plugin for GPUs in it and complains in other runs.
test-targets: .venv-targets/installed
	.venv-targets/bin/python -m pytest -q -n 2 tests/planning/test_targets.py tests/training/test_compiled_for.py \
		tests/planning/test_kernels.py tests/benchmarks/test_counted_softmax.py \
		tests/planning/test_layouts_for_targets.py

test-device: .venv/tested
	$(BIN)/python -c 'import jax, sys; sys.exit(jax.default_backend() == "cpu" and "error: JAX finds no GPU or TPU here: install jax[cuda13] or jax[tpu], see docs/hosts.md")'
	$(BIN)/python -m pytest -q tests/test_configs.py -k tiny_copy

lint: .venv/tested
	$(BIN)/ruff check .

# Warnings are errors: a link that leads nowhere, a page that is not listed, a docstring that cannot be read.
docs: .venv/documented
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . docs/_build
	@echo "Open docs/_build/index.html."

# DATA holds the folders ptb and wikitext-2, each with train, valid and test; the machine has jax, flax, optax, orbax and torch.
gpu-kit: .venv/installed
	@test -d "$(DATA)/ptb" -a -d "$(DATA)/wikitext-2" || { echo "error: DATA=$(DATA) must be a directory with ptb and wikitext-2"; exit 2; }
	rm -rf gpu-kit/wheels
	$(BIN)/python -m pip download -q --no-deps --dest gpu-kit/wheels $$(grep -hE '^(ml_collections|filelock|tensorboardX|jax-cce)' requirements.txt requirements-bench.txt) \
		cut-cross-entropy==25.1.1 liger-kernel==0.8.5
	cp -r "$(DATA)/ptb" "$(DATA)/wikitext-2" gpu-kit && chmod -R u+w gpu-kit
	@echo "Copy the clone with gpu-kit to the machine. There, once, and then three times, as each takes at most ten minutes:"
	@echo "    pip install --no-index --no-deps gpu-kit/wheels/*.whl"
	@echo "    python -m benchmarks.gpu --data=gpu-kit"
	@echo "or, for the full softmax alone, 'python -m benchmarks.loss_on_device'."

# pip prints what it downloads: the first time takes minutes.
.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"error: python {sys.version.split()[0]} is too old: make PYTHON=python3.11 (or newer)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip --version || $(BIN)/python -m ensurepip  # uv makes environments without pip
	$(BIN)/python -m pip install -r requirements.txt -e .
	@touch $@

.venv/tested: .venv/installed
	$(BIN)/python -m pip install -q -e '.[test]'
	@touch $@

.venv/documented: .venv/installed
	$(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@

.venv-targets/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "error: compiling for GPUs and TPUs needs Python 3.12 or newer: make test-targets PYTHON=python3.12")'
	test -x .venv-targets/bin/python || $(PYTHON) -m venv .venv-targets
	.venv-targets/bin/python -m pip install -q -r requirements.txt -e '.[test,targets]'
	@touch $@

clean:
	rm -rf .venv .venv-targets docs/_build
