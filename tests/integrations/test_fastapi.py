"""The application of docs/fastapi.md, in a process of its own: what its page says of it is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pages
import pytest
from workers import Eyes

PAGE = pages.ROOT / "docs" / "fastapi.md"

BEGIN = """
import asyncio, httpx, pgqueue
from purchases import *

def client():
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")
"""


def ask(home: Path, dsn: str, script: str) -> str:
    """Write the page's files into this folder, run the script beside them; what it printed."""
    reader = pages.Reader(home, dsn)
    for block in pages.blocks(PAGE):
        if block.language == "sql" or block.text.startswith("# purchases.py\n"):
            reader.follow(block)
    command = [sys.executable, "-W", "error", "-c", f"{BEGIN}\n{script}\nasyncio.run(main())"]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.promise("F279")
def test_an_id_that_is_unknown_is_404_and_none_is_500(tmp_path: Path, dsn: str) -> None:
    said = ask(
        tmp_path,
        dsn,
        """
async def main():
    async with client() as http:
        answer = await http.post("/purchases/tea")
        print(answer.status_code, answer.headers["Location"], (await http.get(answer.headers["Location"])).json())
        for id in ("2", "0", "-1", str(2**63 - 1), str(2**63), "x"):
            answer = await http.get(f"/jobs/{id}")
            print(id[:3], answer.status_code, answer.json()["detail"] if answer.status_code == 404 else "")
    await engine.dispose()
""",
    )
    assert said.splitlines() == [
        "202 /jobs/1 {'id': 1, 'state': 'available', 'result': None}",
        "2 404 no such job",
        "0 422 ",
        "-1 422 ",
        "922 404 no such job",
        "922 422 ",
        "x 422 ",
    ]


@pytest.mark.promise("F280")
def test_a_request_that_comes_eight_times_at_once_is_one_purchase_and_one_job(
    tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    said = ask(
        tmp_path,
        dsn,
        """
async def main():
    async with client() as http:
        async def ask(key):
            return await http.post("/purchases/tea/once", headers={"Idempotency-Key": key} if key else {})
        answers = await asyncio.gather(*[ask("a") for _ in range(8)])
        print({answer.status_code for answer in answers}, len({answer.headers["Location"] for answer in answers}))
        print((await ask("b")).headers["Location"] in {answer.headers["Location"] for answer in answers})
        print((await ask("")).status_code, (await ask("x" * 101)).status_code)
    await engine.dispose()
""",
    )
    assert said.splitlines() == ["{202} 1", "False", "422 422"]
    assert eyes.one("SELECT count(*) FROM purchase") == 2
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == 2


ORDER = """
naive = FastAPI()

async def too_late():
    async with sessions.begin() as session:
        yield session

@naive.post("/naive")
async def buy_naively(session: Annotated[AsyncSession, Depends(too_late)]) -> Response:
    return accepted(await charge.aenqueue(session, purchase=1))

@naive.post("/scoped")
async def buy_in_scope(session: Annotated[AsyncSession, Depends(too_late, scope="function")]) -> Response:
    return accepted(await charge.aenqueue(session, purchase=1))

async def there_at_the_answer(app, path):
    found = []
    async def receive():
        return {"type": "http.request", "body": b""}
    async def send(message):
        if message["type"] == "http.response.start":
            async with sessions() as session:
                job = int(dict(message["headers"])[b"location"].removeprefix(b"/jobs/"))
                found.append(await pgqueue.afind(session, limit=1) and await known(session, job))
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
             "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [], "root_path": ""}
    await app(scope, receive, send)
    return found

async def known(session, job):
    try:
        return (await pgqueue.aget(session, job)).id == job
    except pgqueue.JobNotFound:
        return False

async def main():
    print(await there_at_the_answer(app, "/purchases/tea"))
    print(await there_at_the_answer(naive, "/naive"), await there_at_the_answer(naive, "/scoped"))
    async with client() as http:
        print((await http.post("/purchases/nothing")).status_code)
    await engine.dispose()
"""


@pytest.mark.promise("F280")
def test_the_job_is_there_when_the_answer_begins_and_not_at_all_after_an_error(
    tmp_path: Path, dsn: str, eyes: Eyes
) -> None:
    """A COMMIT behind the `yield` of a dependency comes after the answer, unless its scope is the function."""
    assert ask(tmp_path, dsn, ORDER).splitlines() == ["[True]", "[False] [True]", "422"]
    assert eyes.all("SELECT item FROM purchase") == [("tea",)]
    assert eyes.one("SELECT count(*) FROM pgqueue.job") == 3


@pytest.mark.second
@pytest.mark.promise("F280")
def test_one_engine_serves_the_application_and_its_worker(tmp_path: Path, dsn: str, eyes: Eyes) -> None:
    said = ask(
        tmp_path,
        dsn,
        """
async def main():
    async with app.router.lifespan_context(app), client() as http:
        jobs = [int((await http.post("/purchases/tea")).headers["Location"].split("/")[-1]) for _ in range(3)]
        print([await pgqueue.aresult(job, timeout=30) for job in jobs])
""",
    )
    assert said.splitlines() == ["['charged', 'charged', 'charged']"]
    assert eyes.all("SELECT DISTINCT charged FROM purchase") == [(True,)]
    same = (
        "SELECT bool_and(p.xmin = j.xmin) FROM purchase p JOIN pgqueue.job_done j ON j.args ->> 'purchase' = p.id::text"
    )
    assert eyes.one(same)
