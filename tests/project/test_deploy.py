"""deploy/ can be read by what it is for, as far as that goes without it: YAML, the query, our own commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from click.testing import CliRunner

from pgqueue.cli import main

DEPLOY = Path(__file__).parents[2] / "deploy"


def manifest(name: str) -> Any:
    [document] = yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8"))
    return document


def understood(arguments: list[str]) -> bool:
    """Whether our command line takes these; nothing is run."""
    result = CliRunner().invoke(main, [*arguments, "--help"])
    return result.exit_code == 0 and "No such" not in result.output


@pytest.mark.promise("S21")
def test_the_deployment_probes_by_health_and_quiets_before_the_end() -> None:
    spec = manifest("kubernetes.yaml")["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    pod = spec["template"]["spec"]
    [worker] = pod["containers"]
    assert understood(worker["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, *arguments = worker[probe]["exec"]["command"]
        assert program == "pgqueue" and understood(arguments)
        assert ("--ready" in arguments) == (probe != "livenessProbe")
    shell, flag, command = worker["lifecycle"]["preStop"]["exec"]["command"]
    found = re.fullmatch(r"timeout (\d+) pgqueue (quiet --host) \"\$\(hostname\)\" (--wait) \|\| true", command)
    assert (shell, flag) == ("sh", "-c") and found is not None
    grace = worker["args"][worker["args"].index("--grace") + 1]
    assert pod["terminationGracePeriodSeconds"] >= int(found[1]) + int(grace.removesuffix("s")) + 20


def test_the_migration_is_a_job_that_ends_before_new_workers_come() -> None:
    job, worker = manifest("kubernetes-migrate.yaml"), manifest("kubernetes.yaml")
    assert (job["kind"], job["spec"]["template"]["spec"]["restartPolicy"]) == ("Job", "Never")
    [migrate] = job["spec"]["template"]["spec"]["containers"]
    [work] = worker["spec"]["template"]["spec"]["containers"]
    assert migrate["args"] == ["migrate"] and understood(migrate["args"])
    assert (migrate["image"], migrate["env"]) == (work["image"], work["env"])


def test_the_scalers_query_runs(conn: psycopg.Connection) -> None:
    spec = manifest("keda.yaml")["spec"]
    assert spec["scaleTargetRef"]["name"] == manifest("kubernetes.yaml")["metadata"]["name"]
    [trigger] = spec["triggers"]
    query = trigger["metadata"]["query"]
    assert conn.execute(query.encode()).fetchall() == [(0,)]
    conn.execute("INSERT INTO pgqueue.job (task) SELECT 't' FROM generate_series(1, 81)")
    assert conn.execute(query.encode()).fetchall() == [(3,)]
    [worker] = manifest("kubernetes.yaml")["spec"]["template"]["spec"]["containers"]
    processes = int(worker["args"][worker["args"].index("--processes") + 1])
    assert f"(NULL, {10 * processes})" in query and trigger["metadata"]["targetQueryValue"] == "1"


def test_the_image_runs_the_supervisor_as_its_first_process() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    instructions = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    known = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD", "HEALTHCHECK"}
    assert {line.split()[0] for line in instructions.splitlines() if line.strip()} == known
    [entry] = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    [command] = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert yaml.safe_load(entry) == ["pgqueue"] and understood(yaml.safe_load(command))
    [health] = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    assert understood(yaml.safe_load(health)[1:])
