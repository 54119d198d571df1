"""Transfers as SQL has them: those to take up at start, and those that ended."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, func, or_, select

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata_server.scheduling.transfer import Transfer
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import TransferChunkRow, TransferRow

__all__ = [
    "Wanted",
    "by_id",
    "by_idempotency_key",
    "page",
    "standing",
    "summary",
    "unended",
    "untold",
]

# Longest that a request may ask a target to hold what it brought.
_MOST_HOLD = 3600.0
_IDS = 500  # in one statement
# Rows of one read: they are taken apart on the event loop.
_CHUNKS = 5_000
# Seconds of a hold that was released; of others it is not above 0.
_RELEASED_HOLD = -TransferRow.hold
_UNENDED = [state.value for state in TransferState if not state.ended]


async def unended(database: Database, among: Sequence[str] | None = None) -> list[Transfer]:
    """Of those with these ids; None: all."""
    condition: ColumnElement[bool] = TransferRow.state.in_(_UNENDED)
    if among is not None:
        condition = and_(condition, TransferRow.id.in_(among))
    return await _whole(database, condition)


async def untold(database: Database, now: float, notice: float) -> list[tuple[str, str, float]]:
    """(id, target, until) of those whose target may still have to be told that they are over:
    for `notice` seconds that they were cancelled or expired, or that a hold was released."""
    hold = _RELEASED_HOLD.label("released_hold")
    stopped = TransferRow.state.in_([TransferState.CANCELLED.value, TransferState.EXPIRED.value])
    rows = await database.rows(
        select(TransferRow.id, TransferRow.target, TransferRow.ended, hold).where(
            or_(
                and_(stopped, TransferRow.ended > now - notice),
                and_(
                    _RELEASED_HOLD > 0,
                    TransferRow.ended + _RELEASED_HOLD > now,
                    TransferRow.ended > now - _MOST_HOLD,
                ),
            )
        )
    )
    return [(row.id, row.target, row.ended + max(row.released_hold, notice)) for row in rows]


async def by_id(database: Database, transfer_id: str) -> Transfer | None:
    found = await _whole(database, TransferRow.id == transfer_id)
    return found[0] if found else None


async def by_idempotency_key(database: Database, key: str) -> Transfer | None:
    found = await _whole(database, TransferRow.idempotency_key == key)
    return found[0] if found else None


async def standing(database: Database, transfer_id: str) -> tuple[str, TransferState] | None:
    """Its target, and its state."""
    rows = await database.rows(
        select(TransferRow.target, TransferRow.state).where(TransferRow.id == transfer_id)
    )
    return (rows[0].target, TransferState(rows[0].state)) if rows else None


async def summary(database: Database, transfer_id: str) -> api.TransferSummary | None:
    """Counts instead of keys."""
    rows = await database.rows(select(TransferRow.__table__).where(TransferRow.id == transfer_id))
    return (await _summaries(database, rows))[0] if rows else None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which transfers a list has. None: whichever. `namespaces`: digests in hexadecimal, of which
    that of its first key is one; by that key a transfer is its tenant's."""

    states: Collection[TransferState] | None = None
    target: str | None = None
    namespaces: Collection[str] | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        if self.states is not None:
            yield TransferRow.state.in_([state.value for state in self.states])
        if self.target is not None:
            yield TransferRow.target == self.target
        if self.namespaces is not None:
            yield exists().where(
                TransferChunkRow.transfer_id == TransferRow.id,
                TransferChunkRow.position == 0,
                func.substr(TransferChunkRow.key, 1, DIGEST_BYTES).in_(
                    [bytes.fromhex(digest) for digest in self.namespaces]
                ),
            )


_ALL = Wanted()


async def page(
    database: Database, after: str | None, limit: int, wanted: Wanted = _ALL
) -> api.TransferList:
    """In order of creation, counts instead of keys."""
    rows = await database.rows(
        select(TransferRow.__table__)
        .where(TransferRow.id > (after or ""), *wanted.conditions())
        .order_by(TransferRow.id)
        .limit(limit + 1)
    )
    shown = rows[:limit]
    return api.TransferList(
        transfers=await _summaries(database, shown),
        next=shown[-1].id if len(rows) > limit else None,
    )


async def _summaries(database: Database, rows: Sequence[Any]) -> list[api.TransferSummary]:
    counts: dict[str, dict[Outcome, int]] = {}
    counted = await database.rows(
        select(TransferChunkRow.transfer_id, TransferChunkRow.outcome, func.count())
        .where(TransferChunkRow.transfer_id.in_([row.id for row in rows]))
        .group_by(TransferChunkRow.transfer_id, TransferChunkRow.outcome)
    )
    for transfer_id, outcome, count in counted:
        counts.setdefault(transfer_id, {})[Outcome(outcome)] = count
    return [
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
        for row in rows
    ]


async def _whole(database: Database, condition: Any) -> list[Transfer]:
    rows = await database.rows(select(TransferRow.__table__).where(condition))
    found = {row.id: _transfer(row) for row in rows}
    ids = sorted(found)
    for start in range(0, len(ids), _IDS):
        # By id: the condition may be true no more, when another server ended one meanwhile.
        await _read_chunks(database, {id_: found[id_] for id_ in ids[start : start + _IDS]})
    # None that was forgotten meanwhile.
    return [transfer for transfer in found.values() if transfer.keys]


async def _read_chunks(database: Database, of: Mapping[str, Transfer]) -> None:
    """A range of positions of all of them at a time: each database seeks that in the primary key,
    as it does not the rows after one of (id, position), of which it reads all for every part."""
    chunks = TransferChunkRow
    left, first = list(of), 0
    while left:
        end = first + max(1, _CHUNKS // len(left))
        part = await database.rows(
            select(chunks.__table__)
            .where(chunks.transfer_id.in_(left), first <= chunks.position, chunks.position < end)
            .order_by(chunks.transfer_id, chunks.position)
        )
        for chunk in part:
            transfer = of[chunk.transfer_id]
            transfer.keys.append(Key(chunk.key))
            transfer.outcomes.append(Outcome(chunk.outcome))
            transfer.sources.append(chunk.source)
        left, first = [id_ for id_ in left if len(of[id_].keys) == end], end
        await asyncio.sleep(0)


def _transfer(row: Any) -> Transfer:
    return Transfer(
        id=row.id,
        state=TransferState(row.state),
        source=row.source,
        target=row.target,
        priority=row.priority,
        created=row.created,
        deadline=row.deadline,
        hold=abs(row.hold),
        released=row.hold < 0,
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
