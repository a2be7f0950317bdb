# Two commands: `make demo` and `make test`. Each sets itself up in .venv.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/*)

.PHONY: demo test check sanitize slow gallery clean

demo: .venv/run
	$(BIN)/workbench demo

test: .venv/dev
	$(MAKE) -j2 check sanitize
	$(BIN)/pytest -m "browser and not slow"
	# The longest file first: a process takes whole files, and neither is to be left with it at the end.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  -m "not slow and not device and not browser" tests/notebooks tests/integration tests/unit

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

sanitize: .venv/dev
	bash tests/sanitize.sh

gallery: .venv/dev
	$(BIN)/python -m workbench.experiments.gallery docs/gallery

slow: .venv/dev
	$(BIN)/pytest -m "slow"

# What the targets above stand on: an environment that is as pyproject.toml says, the native module built.
.venv/run: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --editable .
	touch $@

.venv/dev: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $@ .venv/run

clean:
	rm -rf .venv build runs
