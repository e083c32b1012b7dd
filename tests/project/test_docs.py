"""The pages are true: every example runs, every link leads somewhere, and what exists is described."""

from __future__ import annotations

import doctest
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pages
import pytest
import reference
from pages import PAGES, ROOT, Block, Reader, anchor, anchors, blocks, links, prose
from servers import server_home

import pgqueue
from pgqueue.cli import main
from pgqueue.client import lifespan, middleware
from pgqueue.client.tasks import OTHER_WORDS
from pgqueue.config import Config
from pgqueue.database import migrations
from pgqueue.jobs import job
from pgqueue.worker import services

README = ROOT / "README.md"
INDEX = ROOT / "docs" / "README.md"
COMMANDS = ROOT / "docs" / "commands.md"
ENQUEUE = ROOT / "docs" / "enqueue.md"
OPERATIONS = ROOT / "docs" / "operations.md"
HOWTO = ROOT / "docs" / "howto"
DESIGN = ROOT / "docs" / "design" / "README.md"
CI = ROOT / ".ci" / "run"
PACKAGE = ROOT / "pgqueue"
SKIPPED_LANGUAGES = {"text"}


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory for a page's files; a server under another account must reach them."""
    with server_home() as directory:
        yield directory


def to_run(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in pages.RUN and not block.excuse and not block.elsewhere]


SLOW = {
    "batches",
    "dashboard",
    "enqueue",
    "fastapi",
    "limits",
    "operations",
    "rates",
    "schedules",
    "schema",
    "steps",
    "streams",
    "testing",
    "tutorial",
    "worker",
}
"""The pages whose examples take more than a second: they run in the second stage."""


def each_day(page: Path) -> bool:
    """Whether the examples of this page run every day: those of the README do, others if they are quick."""
    return page.parent != HOWTO and (page.parent != INDEX.parent or page.stem not in SLOW)


def with_examples() -> list[Any]:
    found = [page for page in PAGES if to_run(page)]
    return [page if each_day(page) else pytest.param(page, marks=pytest.mark.second) for page in found]


@pytest.mark.parametrize("page", with_examples(), ids=pages.name)
def test_every_example_runs(page: Path, home: Path, dsn: str) -> None:
    reader = Reader(home, dsn)
    for block in to_run(page):
        reader.follow(block)


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_a_block_that_does_not_run_says_so(page: Path) -> None:
    known = pages.RUN | SKIPPED_LANGUAGES
    assert [str(block) for block in blocks(page) if block.language not in known and not block.excuse] == []


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{pages.name(page)}: {link}"
        assert not anchor or anchor in anchors(target), f"{pages.name(page)}: {link}: no such heading"


def linked(page: Path) -> set[Path]:
    return {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}


def test_every_page_is_in_the_index_and_the_readme_leads_there() -> None:
    assert INDEX in linked(README)
    assert [pages.name(page) for page in PAGES if page != INDEX and page not in linked(INDEX)] == []


def test_the_index_says_of_every_page_which_question_it_answers() -> None:
    rows = re.findall(r"^\| \[[^\]]+\]\([^)]+\) \| (.*) \|$", INDEX.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= len(PAGES) - 1
    assert [row for row in rows if not row.endswith("?")] == []


def test_each_word_of_other_queues_that_an_error_knows_stands_on_their_page() -> None:
    """So what an error answers in a line has a page that says how it differs."""
    said = set(
        re.findall(r"`([a-z_]+)(?:\([^`]*\))?`", (ROOT / "docs" / "other-queues.md").read_text(encoding="utf-8"))
    )
    assert OTHER_WORDS.keys() - said == set()


# What the README must be ---------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 150


def test_the_readme_has_three_pictures_and_seven_promises() -> None:
    text = README.read_text(encoding="utf-8")
    assert re.findall(r"^!\[.+\]\((.+)\)$", text, re.MULTILINE) == [
        "docs/images/overview.png",
        "docs/images/order.svg",
        "bench/results/application.svg",
    ]
    promised = text.partition("## What is promised")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- \*\*", promised, re.MULTILINE)) == 7


def test_each_mark_of_a_source_is_used_listed_and_leads_somewhere() -> None:
    """The page that says what other queues have: a cell without its source would be a claim."""
    text = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    tables, _, rest = text.partition("## Sources")
    listed, _, _ = rest.partition("\n[C1]: ")
    leads = dict(re.findall(r"^\[([A-Z]\d+)\]: (https://\S+)$", text, re.MULTILINE))
    mark = r"\[([A-Z]\d+)\]"
    assert set(re.findall(mark, tables)) == set(re.findall(mark, listed)) == set(leads) != set()
    assert re.search(r"on 20\d\d-\d\d-\d\d", listed), "it says when the sources were read"
    queues = re.findall(r"^- \*\*(.+)\*\*:", listed, re.MULTILINE)
    assert len(queues) == 10
    for queue in queues:
        assert len(re.findall(rf"^\| {queue} \|", tables, re.MULTILINE)) == 8, f"{queue} is in each table"


def test_the_two_commands_of_the_first_screen_are_one_line_each_and_ci_runs_them() -> None:
    commands = [block.text for block in blocks(README) if block.elsewhere == ".ci/run"]
    found = [re.fullmatch(r"\$ (python3 -m venv .+)\n", command) for command in commands]
    assert all(found)
    assert [match[1].rsplit("/", 1)[1] for match in found if match] == ["pgqueue demo", "pytest -n 3"]
    assert r"sed -n 's/^\$ \(python3 -m venv .*\)$/\1/p' README.md" in CI.read_text(encoding="utf-8")
    screen = README.read_text(encoding="utf-8").splitlines()[:40]
    assert sum(line.startswith("$ python3 -m venv") for line in screen) == 2


# Where examples declare something for all jobs that follow.
DECLARED = ((middleware, "_on_start"), (middleware, "_on_finish"), (middleware, "_middleware"), (lifespan, "_declared"))


def test_the_examples_in_docstrings_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "pgqueue").rglob("*.py"))}
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path, source in sources.items()
        if re.search(r"^ *>>> ", source, re.MULTILINE)
    ]
    wrong = []
    for name in names:
        for module, declared in DECLARED:
            monkeypatch.setattr(module, declared, [])
        ran = doctest.testmod(import_module(name), extraglobs={"pgqueue": pgqueue})
        if ran.failed or not ran.attempted:
            wrong.append(name)
    assert wrong == [] and "pgqueue.jobs.cron" in names


def drawing(docstring: str | None) -> str:
    """The first indented part of a docstring."""
    found = re.search(r"\n\n((?:    .*\n)+)\n", docstring or "")
    assert found is not None
    return textwrap.dedent(found[1])


@pytest.mark.parametrize(("drawn", "page"), [(job, ENQUEUE), (services, README)], ids=["states", "flow"])
def test_states_and_flow_are_drawn_as_in_the_code(drawn: object, page: Path) -> None:
    assert drawing(drawn.__doc__) in [block.text for block in blocks(page) if block.language == "text"]


def test_the_module_table_lists_every_module() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    table = re.search(r"^## Modules\n(.*?)^## ", DESIGN.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert table is not None
    listed = {
        name
        for row in re.findall(r"^\|[^|]*\|([^|]*)\|", table[1], re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == modules - {"__init__"}


@pytest.mark.promise("E11")
def test_at_least_once_is_stated_and_exactly_once_delivery_is_not_promised() -> None:
    promised = README.read_text(encoding="utf-8").split("## What is promised", 1)[1].split("\n## ", 1)[0]
    assert "**At least once.**" in promised
    said = " ".join(promised.split())
    assert "a handler may run twice" in said and "Exactly-once *delivery* does not exist" in said


# What exists is described --------------------------------------------------------------------------------------------


def commands() -> dict[str, click.Command]:
    context = click.Context(main)
    return {name: command for name in main.list_commands(context) if (command := main.get_command(context, name))}


def flags(command: click.Command) -> set[str]:
    options = (
        parameter for parameter in command.params if isinstance(parameter, click.Option) and not parameter.hidden
    )
    nested = command.commands.values() if isinstance(command, click.Group) else ()
    own = {name for option in options for name in [*option.opts, *option.secondary_opts]}
    return own.union(*map(flags, nested))


@pytest.mark.parametrize("name", commands())
def test_every_command_and_option_is_described(name: str) -> None:
    found = re.search(
        rf"^### `pgqueue {name}\b.*?`\n(.*?)(?=^##|\Z)",
        OPERATIONS.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert found is not None, f"docs/operations.md has no section for pgqueue {name}"
    described = {
        flag
        for row in re.findall(r"^\| ([^|]*) \|", found[1], re.MULTILINE)
        for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)
    }
    everywhere = {"--dsn", "--schema", "--database", "--only", "--help", "-h"}
    assert described - everywhere == flags(commands()[name]) - everywhere
    assert f"`{name}" in COMMANDS.read_text(encoding="utf-8")


def test_operations_begins_with_contents_that_lead_to_each_section() -> None:
    text = OPERATIONS.read_text(encoding="utf-8")
    contents = text.split("## Contents\n", 1)[1].split("\n## ", 1)[0]
    headings = re.findall(r"^(?:## .+|### `pgqueue .+)$", text, re.MULTILINE)
    led_to = re.findall(r"\]\(#([^)]+)\)", contents)
    assert [each for each in headings if each != "## Contents" and anchor(each.lstrip("# ")) not in led_to] == []


@pytest.mark.parametrize("page", PAGES, ids=pages.name)
def test_no_page_names_a_command_or_option_that_is_not_there(page: Path) -> None:
    for used in re.findall(
        r"^\$ (?:.* )?pgqueue ([a-z].*)$|`pgqueue ([a-z][^`]*)`", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        name, *rest = "".join(used).split("#", 1)[0].split()
        assert name in commands(), f"{pages.name(page)}: pgqueue {name}"
        given = {word.split("=", 1)[0] for word in rest if re.match(r"--?[a-z]", word)}
        known = flags(commands()[name]) | {"-h", "--help"}
        if name == "systemd":  # takes whatever `work` takes
            known |= flags(commands()["work"])
        assert given <= known, f"{pages.name(page)}: pgqueue {' '.join([name, *rest])}"


def test_the_example_of_migrate_names_each_migration() -> None:
    page = (ROOT / "docs" / "schema.md").read_text(encoding="utf-8")
    named = re.findall(r"^applied (\w+)$", page, re.MULTILINE)
    assert named == [f"{each.version:04}_{each.name}" for each in migrations.files()]


def test_every_public_name_is_described() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if page not in reference.pages())
    assert [name for name in pgqueue.__all__ if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.promise("F351")
@pytest.mark.parametrize("page", reference.pages(), ids=pages.name)
def test_the_reference_is_what_the_code_says(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == reference.pages()[page], f"write it anew: {reference.REGENERATE}"


def test_the_reference_has_every_public_name_and_every_command() -> None:
    names, of_commands, _ = (text.splitlines() for text in reference.pages().values())
    assert [name for name in pgqueue.__all__ if f"### {name}" not in names] == []
    assert [name for name in commands() if not any(line.startswith(f"## pgqueue {name}") for line in of_commands)] == []


def test_the_reference_has_each_method_with_its_types() -> None:
    """Naive is a table of names. An address, or a class as Python prints it, says nothing to a reader."""
    text = reference.DOCS.joinpath("reference.md").read_text(encoding="utf-8")
    methods = dict(re.findall(r"^#### ([A-Z]\w+\.\w+)\n\n```text\n(.+?)\n```", text, re.MULTILINE | re.DOTALL))
    for name in (
        "Job.step",
        "Job.iterate",
        "Job.complete",
        "JobHandle.result",
        "Flow.add",
        "Task.enqueue",
        "Worker.stop",
    ):
        assert "->" in methods[name] and not methods[name].startswith("self"), methods.get(name)
    assert re.search(r" at 0x|<class|<factory|codec: ", text) is None


def test_every_environment_variable_is_described() -> None:
    read = set(re.findall(r'"(PGQUEUE_[A-Z_]+)"', (PACKAGE / "config.py").read_text(encoding="utf-8")))
    assert [name for name in sorted(read) if f"`{name}`" not in prose(OPERATIONS)] == []


@pytest.mark.promise("F368")
def test_the_reference_of_settings_has_every_variable_and_says_what_each_means() -> None:
    text = reference.DOCS.joinpath("reference-settings.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    there = {name for row in rows for cell in row[:2] for name in re.findall(r"^`(PGQUEUE_[A-Z_]+)`$", cell)}
    assert there == reference.variables()
    assert not reference.OTHER_VARIABLES.keys() & {f"PGQUEUE_{field.name.upper()}" for field in fields(Config)}
    in_work = {name for row in rows for name in re.findall(r"(?<=`)--[a-z-]+(?=`)", row[0])}
    assert in_work == {name for name in flags(commands()["work"]) if name.startswith("--")} - {"--help"}


def test_a_setting_without_a_sentence_fails_the_reference() -> None:
    def worker(*, lease: float, poll: float) -> None:
        """Work.

        - `lease`: how long it may
          be silent. Default: 15 s.

        More of it.
        """

    assert reference.bullets(worker) == {"lease": "how long it may be silent. Default: 15 s"}
