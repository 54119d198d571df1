"""The quotas of tenants: kept in SQL, and known here.

They are few and seldom change, so servers that share a database read them anew when the table
looks different, which each finds out once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, insert, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata import api
from kvstrata.errors import Busy, Missing
from kvstrata_server.clock import Clock
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import QuotaRow
from kvstrata_server.sql.writer import Writer

__all__ = ["MOST_QUOTAS", "Quota", "Quotas"]

MOST_QUOTAS = 10_000
_REFRESH = 1.0
_COMMIT_TIMEOUT = 10.0
# Of two changes the later one has the later time, whatever the clocks of two servers say.
_TICK = 0.001


@dataclass(frozen=True, slots=True)
class Quota:
    """Bounds of one tenant; None: no bound. See `api.QuotaRequest`."""

    tenant: str
    max_bytes: int | None = None
    max_transfers: int | None = None
    max_transfer_bytes: int | None = None
    changed: float = 0.0


@dataclass(frozen=True, slots=True)
class _Put:
    quota: Quota
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        quota = self.quota
        await connection.execute(delete(QuotaRow).where(QuotaRow.tenant == quota.tenant))
        row = {
            "tenant": quota.tenant,
            "max_bytes": quota.max_bytes,
            "max_transfers": quota.max_transfers,
            "max_transfer_bytes": quota.max_transfer_bytes,
            "changed": quota.changed,
        }
        await connection.execute(insert(QuotaRow).values(row))


@dataclass(frozen=True, slots=True)
class _Drop:
    tenant: str
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await connection.execute(delete(QuotaRow).where(QuotaRow.tenant == self.tenant))


class Quotas:
    """Quotas by tenant, in memory and in SQL. `run` (to be supervised) keeps them fresh."""

    def __init__(self, database: Database, writer: Writer, clock: Clock) -> None:
        self._database = database
        self._writer = writer
        self._clock = clock
        self._known: Mapping[str, Quota] = {}
        self._seen: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self._known)

    def all(self) -> list[Quota]:
        return list(self._known.values())

    def get(self, tenant: str) -> Quota | None:
        return self._known.get(tenant)

    def of_transfers(self, tenant: str) -> tuple[int | None, int | None]:
        """How many transfers may be under way, and of how many bytes; None: no bound."""
        quota = self._known.get(tenant)
        return (None, None) if quota is None else (quota.max_transfers, quota.max_transfer_bytes)

    async def load(self) -> None:
        """Raises `Busy` or `sqlalchemy.exc.DBAPIError` if the database can't be read."""
        looks = select(func.count(), func.max(QuotaRow.changed), func.sum(QuotaRow.changed))
        seen = tuple((await self._database.rows(looks))[0])
        if seen == self._seen:
            return
        rows = await self._database.rows(select(QuotaRow.__table__))
        self._known = {
            row.tenant: Quota(
                row.tenant, row.max_bytes, row.max_transfers, row.max_transfer_bytes, row.changed
            )
            for row in rows
        }
        self._seen = seen

    async def run(self) -> None:
        """Read what changed, for ever. While SQL is away those known stay."""
        while True:
            await asyncio.sleep(_REFRESH)
            try:
                await self.load()
            except (Busy, DBAPIError, OSError, TimeoutError):
                continue  # the writer says in health what is wrong with it

    async def put(self, tenant: str, asked: api.QuotaRequest) -> None:
        """Set all bounds of a tenant. Raises `Busy` if SQL doesn't take it, or there are too many
        of them."""
        known = self._known.get(tenant)
        if known is None and len(self._known) >= MOST_QUOTAS:
            raise Busy(f"there are {len(self._known)} quotas: delete those that nobody needs")
        newest = max((quota.changed for quota in self._known.values()), default=0.0)
        quota = Quota(
            tenant,
            asked.max_bytes,
            asked.max_transfers,
            asked.max_transfer_bytes,
            max(self._clock(), newest + _TICK),
        )
        self._writer.require_room()
        self._writer.put(_Put(quota))
        await self._written()

    async def delete(self, tenant: str) -> None:
        """Raises `Missing` if it has none, `Busy`."""
        if tenant not in self._known:
            raise Missing(f"tenant {api.tenant_name(tenant)!r} has no quota")
        self._writer.require_room()
        self._writer.put(_Drop(tenant))
        await self._written()

    async def _written(self) -> None:
        await self._writer.flushed(_COMMIT_TIMEOUT)
        try:
            async with asyncio.timeout(_COMMIT_TIMEOUT):
                await self.load()
        except (DBAPIError, OSError, TimeoutError):
            raise Busy("the database does not answer: see /healthz") from None
