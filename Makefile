PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint format bench simulate soak proto clean

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard diloco/codec/*.[ch])
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; name it with PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.PHONY: $(VENV)
$(VENV): $(STAMP)

demo: $(STAMP)  ## a coordinator and four islands train a small language model on this machine
	$(BIN)/diloco demo $(ARGS)

test: $(STAMP)  ## everything but the tests marked slow
	$(BIN)/pytest -m 'not slow' $(ARGS)

test-all: $(STAMP)
	$(BIN)/pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python proto/generate.py --check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## prints a table and writes bench.json
	$(BIN)/diloco bench all --json bench.json $(ARGS)

SEEDS ?= 1000
FIRST ?= 0
simulate: $(STAMP)  ## plays SEEDS runs from seed FIRST under a virtual clock, with faults, and checks every one
	$(BIN)/python -m wan.simulator --seeds $(SEEDS) --first $(FIRST) $(ARGS)

MINUTES ?= 5
SEED ?= 0
soak: $(STAMP)  ## a real run of MINUTES whose processes are killed and stopped; writes soak.json
	$(BIN)/python -m wan.soak --minutes $(MINUTES) --seed $(SEED) $(ARGS)

proto: $(STAMP)  ## regenerates diloco/v1 from proto/
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
