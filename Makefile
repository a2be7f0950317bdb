# Two commands: `make demo` and `make test`. Each sets itself up in .venv.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/*)

.PHONY: demo test check slow gallery benchmarks clean

demo: .venv/run
	$(BIN)/workbench demo

test: .venv/dev check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile -m "not slow and not device"
	bash tests/sanitize.sh

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

gallery: .venv/dev
	$(BIN)/python -m workbench.experiments.gallery docs/gallery

slow: .venv/dev
	$(BIN)/pytest -m "slow"

# What the targets above stand on: an environment that is as pyproject.toml says, the native module built.
.venv/run: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

.venv/dev: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ .venv/run

clean:
	rm -rf .venv build runs
