"""`pgqueue web` as a process: it starts closed, or on loopback only, and not otherwise."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from commands import pgqueue
from web_processes import OPERATOR, READER, SECRETS, serving

from pgqueue import distribution
from pgqueue.errors import InvalidOption
from pgqueue.web.server import address_of, bound


def status(url: str, **headers: str) -> tuple[int, str]:
    """The status and the text of the answer; where a redirect leads, the page there."""
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.promise("F143")
def test_with_auth_it_asks_for_a_secret(dsn: str, tmp_path: Path) -> None:
    with serving(dsn, tmp_path / "log", "--auth") as url:
        assert "Sign in" in status(f"{url}/jobs")[1]
        assert status(f"{url}/jobs", accept="application/json")[0] == 401
        assert status(f"{url}/jobs", authorization=f"Bearer {READER}")[0] == 200
        # No header of a proxy is believed, not even from this machine.
        forwarded = status(f"{url}/jobs", authorization=f"Bearer {OPERATOR}", x_forwarded_for="198.51.100.1")
        assert forwarded[0] == 200
    assert READER not in (tmp_path / "log").read_text()


@pytest.mark.promise("F143")
def test_open_it_answers_this_machine_only(dsn: str, tmp_path: Path) -> None:
    with serving(dsn, tmp_path / "log", "--open") as url:
        found, text = status(f"{url}/")
        assert (found, "<title>Overview ·" in text, "operator" in text) == (200, True, True)
        assert status(f"{url}/", host="evil.example")[0] == 403


@pytest.mark.promise("F143")
@pytest.mark.parametrize(
    ("options", "environ", "said"),
    [
        ([], {}, "--auth asks for a secret"),
        (["--auth", "--open"], SECRETS, "--auth asks for a secret"),
        (["--auth"], {}, "PGQUEUE_WEB_READER and PGQUEUE_WEB_OPERATOR"),
        (["--auth"], SECRETS | {"PGQUEUE_WEB_READER": "short"}, "too short"),
        (["--auth"], SECRETS | {"PGQUEUE_WEB_READER": OPERATOR}, "must differ"),
        (["--open", "--bind", "0.0.0.0:8300"], {}, "loopback only"),
        (["--open", "--bind", "[::]:8300"], {}, "loopback only"),
        (["--open", "--bind", "db.example:8300"], {}, "loopback only"),
        (["--open", "--trusted-proxy", "10.0.0.1"], {}, "without --trusted-proxy"),
        (["--open", "--public-url", "https://a.example"], {}, "without --public-url"),
        (["--auth", "--bind", "8300"], SECRETS, "HOST:PORT"),
        (["--auth", "--public-url", "ops.example"], SECRETS, "public URL"),
        (["--auth", "--trusted-proxy", "proxy"], SECRETS, "trusted proxy"),
        (["--auth", "--redact", "*a*", "--no-redaction"], SECRETS, "exclude each other"),
    ],
    ids=str,
)
def test_it_does_not_start_otherwise(dsn: str, options: list[str], environ: dict[str, str], said: str) -> None:
    given: dict[str, Any] = environ
    done = pgqueue("web", *options, dsn=dsn, **given)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and OPERATOR not in done.stderr


def test_an_address_that_is_taken_is_said() -> None:
    with bound("127.0.0.1", 0) as taken, pytest.raises(InvalidOption, match="cannot listen at"):
        bound("127.0.0.1", taken.getsockname()[1])
    assert address_of("[::1]:8300") == ("::1", 8300)
    for wrong in ("", ":", "a:", ":1", "a:99999", "a:b"):
        with pytest.raises(InvalidOption, match="HOST:PORT"):
            address_of(wrong)


WITHOUT = """
import sys
sys.modules[{name!r}] = None
import pgqueue
from pgqueue import distribution
from pgqueue.errors import Error
assert not [name for name, module in sys.modules.items() if module and name.startswith(("starlette", "pgqueue.web"))]
try:
    pgqueue.web.app(auth=lambda visitor: None)
except Error as error:
    print(error)
from click.testing import CliRunner
from pgqueue.cli import main
print(CliRunner().invoke(main, ["web", "--open"]).output)
"""


@pytest.mark.promise("F143")
@pytest.mark.parametrize("name", ["starlette", "jinja2", "uvicorn"])
def test_without_the_extra_it_says_what_to_install(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT.format(name=name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(distribution.install("web")) == (1 if name == "uvicorn" else 2), done.stdout


@pytest.mark.promise("F409")
@pytest.mark.promise("F410")
def test_it_serves_several_databases_though_one_is_away(dsn: str, tmp_path: Path) -> None:
    away = "postgresql://nobody@127.0.0.1:1/away?connect_timeout=2"
    named = ["--database", f"away={away}", "--database", f"here={dsn}"]
    with serving(None, tmp_path / "log", "--open", *named) as url:
        found, text = status(f"{url}/")
        assert (found, 'href="/db/away/"' in text, 'href="/db/here/"' in text) == (200, True, True)
        assert status(f"{url}/db/here/queues")[0] == 200 and status(f"{url}/db/away/queues")[0] == 503
    with serving(None, tmp_path / "log", "--open", *named, "--only", "here") as url:
        assert status(f"{url}/queues")[0] == 200 and status(f"{url}/db/here/")[0] == 404
    for options, said in (
        (["--only", "x", *named], "there are: away, here"),
        (["--only", "x"], "--only is for several databases"),
        (["--database", "a=mysql://h/x"], "use postgresql://"),
        (["--database", f"a={dsn}", "--database", f"a={dsn}"], "named twice"),
        (["--dsn", dsn, "--database", f"a={dsn}"], "exclude each other"),
    ):
        done = pgqueue("web", "--open", *options)
        assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.promise("F150")
def test_with_modules_it_has_a_form_for_each_of_their_tasks(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(
        "import pgqueue\npgqueue.configure(dsn='host=/nowhere')\n\n"
        "@pgqueue.task(name='shop.pay')\ndef pay(order: int) -> None: ...\n"
    )
    with serving(dsn, tmp_path / "log", "shop_tasks", "--app-dir", str(tmp_path), "--open") as url:
        assert 'href="/enqueue?task=shop.pay"' in status(f"{url}/enqueue")[1]
        assert 'name="arg.order"' in status(f"{url}/enqueue?task=shop.pay")[1]
        assert status(f"{url}/queues")[0] == 200, "the command line's database, and not the module's"
    for module, said in (("nothing_here", "no module 'nothing_here'"), ("json", "no task is declared there")):
        ended = pgqueue("web", module, "--open", "--app-dir", str(tmp_path), dsn=dsn)
        assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr
