"""The distribution's name stands in pyproject.toml and follows from there; extras are those that are spoken of."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from pgqueue import distribution
from pgqueue.cli.exit_codes import code_of
from pgqueue.errors import Error

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NAME = PYPROJECT["project"]["name"]
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# Where the name is given, and where it is repeated: once for the code, once for readers.
GIVEN, REPEATED = "pyproject.toml", ["README.md", "pgqueue/distribution.py"]


def texts() -> Iterator[tuple[str, str]]:
    """Every file of the source distribution with text, by its path."""
    for place in PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        top = ROOT / place.removeprefix("/")
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and path.suffix not in (".pyc", ".png"):
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_the_name_is_that_of_pyproject_and_of_what_is_installed() -> None:
    assert distribution.NAME == NAME
    assert metadata.metadata(distribution.NAME)["Name"] == NAME
    assert distribution.install("embedded") == f"pip install '{NAME}[embedded]' (from a checkout '.[embedded]')"


@pytest.mark.parametrize(
    ("extra", "package"),
    [("prometheus", "prometheus_client"), ("otel", "opentelemetry"), ("sentry", "sentry_sdk"), ("web", "uvicorn")],
)
def test_what_lacks_the_package_of_an_extra_says_what_to_install(extra: str, package: str) -> None:
    with pytest.raises(Error, match=f"needs {package}: ") as caught, distribution.needs_extra(extra):
        raise ModuleNotFoundError(name=f"{package}.core")
    assert distribution.install(extra) in str(caught.value)
    assert (code_of(caught.value), code_of(Error("no extra is missing"))) == (2, 3)
    with pytest.raises(ModuleNotFoundError), distribution.needs_extra(extra):
        raise ModuleNotFoundError(name="something_else")


def test_the_name_stands_nowhere_else_for_it_may_change() -> None:
    # With a dot it is a wing of the package, with `_total` a metric, behind `#` the anchor of `pgqueue jobs`.
    spelled = re.compile("(?<!#)" + re.sub("[-_.]", "[-_]", NAME) + r"(?!_total\b)", re.IGNORECASE)
    # The record of a comparison says what was measured, by the name that it had.
    recorded = "bench/results/"
    found = {path: spelled.findall(text) for path, text in texts() if path != GIVEN and not path.startswith(recorded)}
    assert len(found) > 300
    assert {path: names for path, names in found.items() if names} == {path: [NAME] for path in REPEATED}


def test_an_extra_that_takes_in_others_calls_them_by_the_name() -> None:
    """Under an old name pip would look for another project."""
    own = [one for needs in EXTRAS.values() for one in needs if one.startswith(("pgqueue", NAME))]
    assert own == [f"{NAME}[fast,embedded,web,prometheus,otel,sentry]"]


def test_the_readme_names_every_extra_and_nobody_one_that_is_not_there() -> None:
    ours = [(path, text) for path, text in texts() if path.endswith(".md") or path.startswith("pgqueue/")]
    named = {path: set(extras(text)) for path, text in ours}
    assert named["README.md"] == set(EXTRAS)
    assert "embedded" in named["pgqueue/database/embedded.py"] & named["docs/testing.md"]
    assert {path: names for path, names in named.items() if not names <= set(EXTRAS)} == {}


def extras(text: str) -> Iterator[str]:
    """Whatever is called one, in three ways, and whatever an install takes in."""
    prose = " ".join(text.split())
    for found in re.findall(r"`(\w+)` extra\b|\bextra `(\w+)`|'\.\[([\w,]+)\]'|\binstall\('(\w+)'\)", prose):
        yield from "".join(found).split(",")
    for listed in re.findall(r"\bextras: ([^.]*)\.", prose):
        yield from re.findall(r"`(\w+)`", listed)
