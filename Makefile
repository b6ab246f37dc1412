# `make demo` and `make test` are all a new user needs; each makes .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

.PHONY: setup demo test check bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "making $(VENV): torch and all else, a minute or more"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/arachne demo

test: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# every figure of the docs, some four hours; on an idle machine
bench: setup
	for name in exactness overhead runtime memory models estimate price planning_time replanning oracle planners learned \
	            learned_later profile demo feedback unequal_dp_numbers unequal_dp unequal_target \
	            migration checkpoints restarts trace_simulation; do \
	    $(BIN)/python -m bench.$$name --out bench/results || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist out
