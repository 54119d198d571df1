"""Alembic's entry point: on the server's own connection at start, or on an address by hand.

By hand: `alembic -x url=sqlite:///kvstrata.sqlite upgrade head` from the repository.
"""

import asyncio

from alembic import context
from sqlalchemy import Connection, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from kvstrata_server.sql.models import Base


def migrate(connection: Connection) -> None:
    # Batch mode: SQLite alters a table by copying it.
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


def migrate_address(url: str) -> None:
    if not url:
        raise SystemExit("which database? alembic -x url=sqlite:///kvstrata.sqlite upgrade head")
    if make_url(url).get_dialect().is_async:
        asyncio.run(migrate_async(url))
        return
    engine = create_engine(url)
    with engine.connect() as connection:
        migrate(connection)
    engine.dispose()


async def migrate_async(url: str) -> None:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    await engine.dispose()


given = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    migrate_address(context.get_x_argument(as_dictionary=True).get("url", ""))
