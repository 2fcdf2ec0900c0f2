# Each of these does all of its own set-up in a virtual environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test coverage check bench clean

demo: .venv/ready
	$(BIN)/codistill demo

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Which lines and branches the tests reach; tracing makes them a fifth slower.
coverage: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python -m bench

clean:
	rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
