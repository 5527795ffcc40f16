# Everything runs in .venv of this checkout; the stamp makes a second call start at once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-runs test-rest test-all check format docs install model bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	touch $(STAMP)

model: install
	$(BIN)/ppl-eval fetch smollm2-135m

demo: model
	$(BIN)/tune run --nproc_per_node 2 distributed_ppl_eval --config smollm2/135M_ppl output_dir=runs/demo

# Two halves side by side: tests of whole runs wait for processes and timeouts, the others compute.
RUNS := $(addprefix tests/,api commands distributed experiments parallel recipe run test_wheel.py)

test: model
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-runs test-rest

test-runs:
	$(BIN)/python -m pytest $(RUNS)

test-rest:
	$(BIN)/python -m pytest $(addprefix --ignore=,$(RUNS))

test-all: model
	$(BIN)/python -m pytest -m "slow or not slow"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

bench: model
	$(BIN)/python benchmarks/throughput.py

clean:
	rm -rf $(VENV) runs site build dist recipes/*.egg-info
