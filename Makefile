# Two commands for a fresh machine with python3 (3.11 or newer, with venv): `make train` and `make test`.
PYTHON ?= python3
WORKDIR ?= runs/quickstart
BIN := .venv/bin

.PHONY: train test lint clean

train: .venv/installed
	$(BIN)/python train.py --config=configs/quickstart.py --workdir=$(WORKDIR)
	$(BIN)/python evaluate.py --workdir=$(WORKDIR) --split=test
	@echo
	@echo "The run is in $(WORKDIR): metrics.jsonl, checkpoints/, eval/."
	@echo "Curves:  $(BIN)/pip install tensorboard && $(BIN)/tensorboard --logdir $(WORKDIR)"
	@echo "Next:    $(BIN)/python evaluate.py --workdir=$(WORKDIR) --split=test --window=64 --context=48"
	@echo "         $(BIN)/python train.py --config=configs/quickstart.py --workdir=runs/deeper --config.body.layers=4"

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n auto --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check .

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"error: python {sys.version.split()[0]} is too old: make PYTHON=python3.11 (or newer)")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq -r requirements.txt -e '.[test]'
	@touch $@

clean:
	rm -rf .venv runs
