# What CI checks, by hand, in the environment that the README's test command makes.
BIN ?= .venv/bin

UV ?= uv
LOWEST = build/lowest
# What the oldest packages may lack: the codec, schedules, the command line, the dashboard's door, telemetry, drivers,
# SQLAlchemy, Alembic, Django, FastAPI, and what a handler does on its connection.
LOWEST_TESTS = tests/jobs tests/client tests/cli/test_help.py tests/cli/test_names.py tests/cli/test_reading.py \
	tests/cli/test_exit_codes.py tests/web/test_access.py tests/web/test_pages.py tests/test_config.py tests/telemetry \
	tests/integrations tests/database/test_drivers.py tests/worker/transactions

.PHONY: check format lint types test second lowest

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

# With the oldest packages that pyproject.toml allows, in an environment of its own.
lowest:
	python3 -m venv --clear $(LOWEST)
	$(UV) pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[dev,docs,celery,binary]'
	$(LOWEST)/bin/python -m pytest -n 2 $(LOWEST_TESTS)
