"""A session that is rolled back after the test, and a client whose requests use it."""

from collections.abc import AsyncIterator

import pytest
from httpx import ASGITransport, AsyncClient
from shop.api import app, get_session
from shop.database import Base
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine


@pytest.fixture
async def session(pgqueue_url: str) -> AsyncIterator[AsyncSession]:
    engine = create_async_engine(make_url(pgqueue_url).set(drivername="postgresql+asyncpg"))
    async with engine.connect() as connection, connection.begin() as transaction:
        await connection.run_sync(Base.metadata.create_all)
        async with AsyncSession(
            connection, join_transaction_mode="create_savepoint", expire_on_commit=False
        ) as session:
            yield session
        await transaction.rollback()
    await engine.dispose()


@pytest.fixture
async def client(session: AsyncSession) -> AsyncIterator[AsyncClient]:
    app.dependency_overrides[get_session] = lambda: session
    async with AsyncClient(transport=ASGITransport(app), base_url="http://shop") as client:
        yield client
    app.dependency_overrides.clear()
