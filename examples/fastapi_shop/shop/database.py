"""The engine of the application and its model. The queue is in the same database."""

import os

from sqlalchemy import BigInteger, Text, false
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import pgqueue

engine = create_async_engine(os.environ.get("DATABASE_URL", "postgresql+asyncpg:///shop"))
sessions = async_sessionmaker(engine, expire_on_commit=False)
pgqueue.configure(dsn=engine.url.render_as_string(hide_password=False))


class Base(DeclarativeBase):
    """The models of the shop."""


class Purchase(Base):
    """What a customer has bought."""

    __tablename__ = "purchase"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    item: Mapped[str] = mapped_column(Text)
    charged: Mapped[bool] = mapped_column(server_default=false(), default=False)
