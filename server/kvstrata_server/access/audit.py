"""Who changed what, and when: a row for every operation that changes state by request.

Written behind the answer, in order, by the one writer of SQL. What nodes report many times a second
(heartbeats, placements, progress) is their state, not somebody's act, and is not in here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata import api
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import AuditRow

__all__ = ["ForgetAudit", "PutAudit", "page"]


@dataclass(frozen=True, slots=True)
class PutAudit:
    """One act: `operation` as in the API's document, `subject` the path of what it was about: of
    a transfer, say, that it made."""

    time: float
    actor: str
    client: str
    operation: str
    subject: str
    status: int
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        row = {
            "time": self.time,
            "actor": self.actor[:128],
            "client": self.client[:64],
            "operation": self.operation[:64],
            "subject": self.subject[:255],
            "status": self.status,
        }
        await connection.execute(insert(AuditRow).values(row))


@dataclass(frozen=True, slots=True)
class ForgetAudit:
    """Drop what is older."""

    before: float
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await connection.execute(delete(AuditRow).where(AuditRow.time < self.before))


async def page(database: Database, after: int, limit: int) -> api.AuditList:
    """Oldest first, those with ids over `after`."""
    rows = await database.rows(
        select(AuditRow.__table__).where(AuditRow.id > after).order_by(AuditRow.id).limit(limit + 1)
    )
    shown = [
        api.AuditEntry(
            id=row.id,
            time=row.time,
            actor=row.actor,
            client=row.client,
            operation=row.operation,
            subject=row.subject,
            status=row.status,
        )
        for row in rows[:limit]
    ]
    return api.AuditList(entries=shown, next=shown[-1].id if len(rows) > limit else None)
