"""Transfers as SQL has them: those to take up at start, and those that ended."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.keys import Key
from kvstrata_server.database import Database
from kvstrata_server.models import TransferChunkRow, TransferRow
from kvstrata_server.transfer import Transfer

__all__ = ["by_id", "by_idempotency_key", "page", "unended"]

_UNENDED = [state.value for state in TransferState if not state.ended]


async def unended(database: Database) -> list[Transfer]:
    return await _whole(database, TransferRow.state.in_(_UNENDED))


async def by_id(database: Database, transfer_id: str) -> Transfer | None:
    found = await _whole(database, TransferRow.id == transfer_id)
    return found[0] if found else None


async def by_idempotency_key(database: Database, key: str) -> Transfer | None:
    found = await _whole(database, TransferRow.idempotency_key == key)
    return found[0] if found else None


async def page(database: Database, after: str | None, limit: int) -> api.TransferList:
    """In order of creation, counts instead of keys."""
    rows = await database.rows(
        select(TransferRow.__table__)
        .where(TransferRow.id > (after or ""))
        .order_by(TransferRow.id)
        .limit(limit + 1)
    )
    shown = rows[:limit]
    counts: dict[str, dict[Outcome, int]] = {}
    counted = await database.rows(
        select(TransferChunkRow.transfer_id, TransferChunkRow.outcome, func.count())
        .where(TransferChunkRow.transfer_id.in_([row.id for row in shown]))
        .group_by(TransferChunkRow.transfer_id, TransferChunkRow.outcome)
    )
    for transfer_id, outcome, count in counted:
        counts.setdefault(transfer_id, {})[Outcome(outcome)] = count
    return api.TransferList(
        transfers=[
            api.TransferSummary(
                id=row.id,
                state=TransferState(row.state),
                source=row.source,
                target=row.target,
                priority=row.priority,
                created=row.created,
                deadline=row.deadline,
                ended=row.ended,
                detail=row.detail,
                bytes=row.moved_bytes,
                counts=counts.get(row.id, {}),
            )
            for row in shown
        ],
        next=shown[-1].id if len(rows) > limit else None,
    )


async def _whole(database: Database, condition: Any) -> list[Transfer]:
    rows = await database.rows(select(TransferRow.__table__).where(condition))
    found = {row.id: _transfer(row) for row in rows}
    chunks = (
        select(TransferChunkRow.__table__)
        .where(TransferChunkRow.transfer_id.in_(select(TransferRow.id).where(condition)))
        .order_by(TransferChunkRow.transfer_id, TransferChunkRow.position)
    )
    async for part in database.stream(chunks):
        for chunk in part:
            transfer = found.get(chunk.transfer_id)
            if transfer is not None:
                transfer.keys.append(Key(chunk.key))
                transfer.outcomes.append(Outcome(chunk.outcome))
                transfer.sources.append(chunk.source)
    return list(found.values())


def _transfer(row: Any) -> Transfer:
    return Transfer(
        id=row.id,
        state=TransferState(row.state),
        source=row.source,
        target=row.target,
        priority=row.priority,
        created=row.created,
        deadline=row.deadline,
        hold=row.hold,
        byte_budget=row.byte_budget,
        keys=[],
        outcomes=[],
        sources=[],
        idempotency_key=row.idempotency_key,
        request_digest=row.request_digest,
        ended=row.ended,
        bytes=row.moved_bytes,
        detail=row.detail,
        hints=row.hints,
        free_only=row.free_only,
    )
