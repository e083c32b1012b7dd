"""The dashboard by one line in urls.py: for staff, under WSGI and ASGI, with the names of users in the record."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest
from django_projects import WITH_ADMIN, DjangoProject, database

pytestmark = pytest.mark.promise("F296")

URLS = """
from django.contrib import admin
from django.urls import include, path
from pgqueue.integrations.django import dashboard

urlpatterns = [
    path("admin/", admin.site.urls),
    path("ops/jobs/", include("pgqueue.integrations.django.dashboard")),
    path("mine/", include(dashboard.urls(rights=lambda user: {"cancel"} if user.is_authenticated else None))),
]
"""
SCRIPT = """
import asyncio, re
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import connection, connections
from django.test import AsyncClient, Client
from shop.tasks import greet

PAGES = ["", "jobs", "queues", "limits", "schedules", "workers", "errors", "history", "bulk", "static/pgqueue.css"]
SAME_SITE = {"sec-fetch-site": "same-origin"}
for name, more in ("plain", {}), ("staff", {"is_staff": True}), ("boss", {"is_staff": True, "is_superuser": True}):
    User.objects.create(username=name, **more)
jobs = [greet.enqueue("default", name).id for name in ("Ann", "Bob", "Cleo")]

async def check(client, mine):
    async def status(method, path, **options):
        form = {"content_type": "application/x-www-form-urlencoded"} if method == "post" else {}
        answer = await getattr(client, method)(path, **form, **options)
        return answer.status_code, answer.headers.get("location")

    await client.alogout()
    assert await status("get", "/ops/jobs/jobs?x=1") == (302, "/admin/login/?next=/ops/jobs/jobs%3Fx%3D1")
    assert (await status("post", "/ops/jobs/pause"))[0] == 403
    await client.aforce_login(await User.objects.aget(username="plain"))
    assert (await status("get", "/ops/jobs/"))[0] == 403
    assert (await status("get", "/mine/"))[0] == 200
    await client.aforce_login(await User.objects.aget(username="staff"))
    assert await status("get", "/ops/jobs") == (301, "/ops/jobs/")
    for page in PAGES:
        answer = await client.get("/ops/jobs/" + page)
        assert answer.status_code == 200, page
        found = re.findall(r'(?:href|action|src)="([^"]*)"', answer.content.decode())
        assert all(each.startswith(("/ops/jobs/", "#")) for each in found), (page, found)
    assert "csrf" not in answer.content.decode()
    assert (await status("post", f"/ops/jobs/jobs/{mine}/cancel", headers=SAME_SITE))[0] == 403
    assert (await status("post", f"/mine/jobs/{mine}/retry", headers=SAME_SITE))[0] == 403
    await client.aforce_login(await User.objects.aget(username="boss"))
    other = {"sec-fetch-site": "cross-site"}
    assert (await status("post", f"/ops/jobs/jobs/{mine}/cancel", headers=other))[0] == 403
    did, where = await status("post", f"/ops/jobs/jobs/{mine}/cancel", headers=SAME_SITE)
    assert did == 303 and where.startswith(f"/ops/jobs/jobs/{mine}?did="), where
    answer = await client.get("/ops/jobs/jobs?state=cancelled", headers={"accept": "application/json"})
    assert mine in [each["id"] for each in answer.json()["items"]]

class Sync(Client):
    '''The client of WSGI, awaited as the other one is.'''
    async def get(self, *args, **options):
        return await asyncio.to_thread(super().get, *args, **options)

    async def post(self, *args, **options):
        return await asyncio.to_thread(super().post, *args, **options)

asyncio.run(check(Sync(enforce_csrf_checks=True), jobs[0]))
asyncio.run(check(AsyncClient(enforce_csrf_checks=True), jobs[1]))
with connection.cursor() as cursor:
    cursor.execute("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND datname = current_database()")
    assert cursor.fetchone()[0] > 0
connection.close()
asyncio.run(sync_to_async(connections.close_all)())  # those of the clients, which begin no request as servers do
asyncio.run(check(AsyncClient(), jobs[2]))
print("all is well")
"""
TESTS = """
from django.contrib.auth.models import User
from django.db import connection
from django.test import TestCase

class Pages(TestCase):
    def test_a_page(self):
        self.client.force_login(User.objects.create(username="boss", is_staff=True))
        answer = self.client.get("/ops/jobs/")
        self.assertIn("pgqueue", answer.content.decode())
        self.assertIn(answer.status_code, (200, 503))
"""


@pytest.fixture
def project(tmp_path: Path, dsn: str) -> DjangoProject:
    made = DjangoProject(tmp_path, {"default": database(dsn)}, more=WITH_ADMIN)
    (tmp_path / "shop" / "urls.py").write_text(URLS)
    return made


def test_staff_see_it_and_changes_have_the_name_of_the_user(project: DjangoProject, dsn: str) -> None:
    project.manage("migrate")
    assert "all is well" in project.python(SCRIPT)
    with psycopg.connect(dsn) as conn:
        assert conn.execute("SELECT actor, action FROM pgqueue.audit").fetchall() == [("boss", "cancel")] * 3


def test_in_a_test_no_connection_of_it_is_left(project: DjangoProject) -> None:
    (project.home / "shop" / "tests.py").write_text(TESTS)
    assert "Ran 1 test" in project.manage("test")


def test_without_the_middleware_that_knows_users_it_says_so(project: DjangoProject) -> None:
    script = "from django.test import Client\nClient().get('/ops/jobs/')"
    settings = project.home / "shop" / "settings.py"
    settings.write_text(f"{settings.read_text()}\nMIDDLEWARE = []\n")
    assert "needs AuthenticationMiddleware" in project.python(script, code=1)
