"""Alembic on the application's own engine."""

import asyncio

from alembic import context
from shop.database import Base, engine
from sqlalchemy import Connection

from pgqueue.integrations.alembic import include_name


def migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, include_name=include_name)
    with context.begin_transaction():
        context.run_migrations()


async def main() -> None:
    async with engine.connect() as connection:
        await connection.run_sync(migrate)
    await engine.dispose()


asyncio.run(main())
