# Each of these does all of its own set-up in a virtual environment in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test coverage check docs notebook wheel trials bench clean

demo: .venv/ready
	$(BIN)/codistill demo

# Three at a time: tests of the network wait more than they compute.
test: .venv/ready
	$(BIN)/python -m pytest -n 3 --dist loadfile

# Which lines and branches the tests reach; tracing makes them a fifth slower.
coverage: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term:skip-covered

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in site/; a warning is an error.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The notebooks, executed from top to bottom without a screen; a cell that fails is an error.
notebook: .venv/ready
	$(BIN)/jupyter-execute --timeout=300 examples/*.ipynb

# The wheel, installed into empty environments with and without extras, runs the demo in another folder.
wheel: .venv/ready
	.ci/wheel

# What takes longer than the tests by its nature: see trials/README.md.
trials: .venv/ready
	$(BIN)/python -m trials

bench: .venv/ready
	$(BIN)/python -m bench

clean:
	rm -rf .venv build dist site *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
