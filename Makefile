# What CI checks, by hand, in the environment that the README's test command makes.
BIN ?= .venv/bin

.PHONY: check format lint types test second

check: lint types test second

lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

test:
	$(BIN)/pytest -n 3

format:
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

second:
	$(BIN)/pytest -n 3 -m second
