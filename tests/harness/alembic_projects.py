"""A project of Alembic as `alembic init` makes it, in a directory of its own; its commands run in this process."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
from alembic import command
from alembic.config import Config

ENV = """
import asyncio
from alembic import context
from sqlalchemy import create_engine, pool
from sqlalchemy.ext.asyncio import create_async_engine

url = context.config.get_main_option("sqlalchemy.url")
given = context.config.attributes

def run(connection):
    context.configure(connection=connection, **given)
    with context.begin_transaction():
        context.run_migrations()

async def run_async():
    engine = create_async_engine(url, poolclass=pool.NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)
    await engine.dispose()

if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, **given)
    with context.begin_transaction():
        context.run_migrations()
elif "+asyncpg" in url:
    asyncio.run(run_async())
else:
    engine = create_engine(url, poolclass=pool.NullPool)
    with engine.connect() as connection:
        run(connection)
    engine.dispose()
"""
REVISION = """
from alembic import op
from pgqueue.integrations import alembic

revision = {name!r}
down_revision = {before!r}

def upgrade():
    {up}

def downgrade():
    {down}
"""
SCRIPT = """
import sqlalchemy as sa
from alembic import op
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
def upgrade():
    ${upgrades if upgrades else "pass"}
def downgrade():
    pass
"""


class AlembicProject:
    """A project on this database with a driver of SQLAlchemy; `given` goes to `context.configure`."""

    def __init__(self, home: Path, dsn: str, driver: str, **given: Any) -> None:
        self.home = home
        (home / "versions").mkdir(exist_ok=True)
        (home / "env.py").write_text(ENV)
        (home / "script.py.mako").write_text(SCRIPT)
        self._url = f"postgresql+{driver}://{pages.address(dsn)}".replace("%", "%%")
        self._given = given
        self._names: list[str] = []

    def revision(self, up: str, down: str = "pass") -> str:
        """Add a revision after those that are there; its name."""
        name, before = f"r{len(self._names) + 1}", self._names[-1] if self._names else None
        source = REVISION.format(name=name, before=before, up=up, down=down)
        (self.home / "versions" / f"{name}.py").write_text(source)
        self._names.append(name)
        return name

    def upgrade(self, revision: str = "head", *, sql: bool = False) -> str:
        """`alembic upgrade`; what it printed with --sql."""
        return self._run(command.upgrade, revision, sql)

    def downgrade(self, revision: str, *, sql: bool = False) -> str:
        """`alembic downgrade`; what it printed with --sql."""
        return self._run(command.downgrade, revision, sql)

    def autogenerate(self) -> str:
        """The revision that `alembic revision --autogenerate` would make of an application without a table."""
        made = command.revision(self._config(io.StringIO()), autogenerate=True)
        return Path(made.path).read_text()  # type: ignore[union-attr]

    def _run(self, do: Callable[..., None], revision: str, sql: bool) -> str:
        printed = io.StringIO()
        do(self._config(printed), revision, sql=sql)
        return printed.getvalue()

    def _config(self, printed: io.StringIO) -> Config:
        config = Config(output_buffer=printed, stdout=io.StringIO(), attributes=self._given)
        config.set_main_option("script_location", str(self.home))
        config.set_main_option("sqlalchemy.url", self._url)
        config.set_main_option("path_separator", "os")
        return config
