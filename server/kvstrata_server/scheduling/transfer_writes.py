"""What the scheduler writes to SQL, and what SQL made of it.

Several servers may ask for what excludes each other: one ends a transfer that another ends
otherwise, two make one with the same idempotency key. The first that SQL gets wins. Each write
keeps what SQL has after it, which is what its server answers; and it tells the others, in the
change log and the same transaction, only what took effect. Applied twice, a write leaves the same
rows and says so once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, case, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata.api import Outcome, TransferState
from kvstrata.keys import Key
from kvstrata_server.sql.changes import (
    HoldReleased,
    TransferAdvanced,
    TransferEnded,
    TransferMade,
    tell,
)
from kvstrata_server.sql.models import TransferChunkRow, TransferRow
from kvstrata_server.sql.writes import many, table_of

__all__ = [
    "AdvanceTransfer",
    "EndTransfer",
    "ForgetTransfers",
    "Outcomes",
    "PutTransfer",
    "ReleaseHold",
    "final_state",
]

_MOST_FORGOTTEN = 200
_MOST_CHUNKS_FORGOTTEN = 200_000
_HERE = (Outcome.STORED.value, Outcome.PRESENT.value)


def final_state(keys: int, here: int) -> TransferState:
    """What final progress makes of a transfer, of whose keys some are at the target now."""
    if here == keys:
        return TransferState.DONE
    return TransferState.PARTIAL if here else TransferState.FAILED


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Of some of its keys, by their positions; all three run in parallel."""

    positions: Sequence[int]
    outcomes: Sequence[Outcome]
    sources: Sequence[str | None]

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[tuple[int, str, str | None]]:
        for position, outcome, source in zip(
            self.positions, self.outcomes, self.sources, strict=True
        ):
            yield position, outcome.value, source


@dataclass(slots=True)
class PutTransfer:
    """A new one, unless there is one with its idempotency key."""

    id: str
    state: str
    source: str
    target: str
    priority: int
    created: float
    deadline: float
    hold: float
    byte_budget: int | None
    free_only: bool
    hints: Mapping[str, Any]
    idempotency_key: str | None
    request_digest: bytes
    detail: str
    keys: Sequence[Key]
    chunks: Outcomes
    log_as: str
    kept: str | None = field(default=None, init=False)
    """Id of the one that SQL has: this, or that with the same key. None: not written yet."""

    @property
    def rows(self) -> int:
        return 1 + len(self.chunks)

    async def apply(self, connection: AsyncConnection) -> None:
        transfers = table_of(TransferRow)
        same = transfers.c.id == self.id
        if self.idempotency_key is not None:
            same = or_(same, transfers.c.idempotency_key == self.idempotency_key)
        self.kept = await connection.scalar(select(transfers.c.id).where(same))
        if self.kept is not None:
            return
        row = {
            "id": self.id,
            "state": self.state,
            "source": self.source,
            "target": self.target,
            "priority": self.priority,
            "created": self.created,
            "deadline": self.deadline,
            "ended": None,
            "hold": self.hold,
            "byte_budget": self.byte_budget,
            "free_only": self.free_only,
            "moved_bytes": 0,
            "detail": self.detail,
            "hints": dict(self.hints),
            "idempotency_key": self.idempotency_key,
            "request_digest": self.request_digest,
        }
        await connection.execute(insert(transfers).values(row))
        chunks = (
            {
                "transfer_id": self.id,
                "position": position,
                "key": self.keys[position],
                "outcome": outcome,
                "source": source,
            }
            for position, outcome, source in self.chunks
        )
        await many(connection, insert(table_of(TransferChunkRow)), chunks)
        await tell(connection, self.log_as, TransferMade(self.id))
        self.kept = self.id


@dataclass(frozen=True, slots=True)
class AdvanceTransfer:
    """It runs, and this became of some of its keys; unless it has ended."""

    id: str
    incarnation: str
    link: str
    """Source of the link that it was counted at, as far as is known."""
    bytes: int
    detail: str
    chunks: Outcomes
    log_as: str

    @property
    def rows(self) -> int:
        return 1 + len(self.chunks)

    async def apply(self, connection: AsyncConnection) -> None:
        if not await _change(connection, self.id, self.bytes, self.detail, TransferState.RUNNING):
            return
        await _set_outcomes(connection, self.id, self.chunks)
        entry = TransferAdvanced(self.id, self.incarnation, self.link, self.bytes)
        await tell(connection, self.log_as, entry)


@dataclass(slots=True)
class EndTransfer:
    """It is over, unless it was; keys without an outcome get `rest`. `wanted` None: done, partial
    or failed, as the outcomes say that SQL has then."""

    id: str
    target: str
    wanted: TransferState | None
    rest: Outcome
    ended: float
    bytes: int
    detail: str
    chunks: Outcomes
    log_as: str
    state: TransferState | None = field(default=None, init=False)
    """That it ended in, by this or before. None: not written yet, or SQL doesn't know it."""

    @property
    def rows(self) -> int:
        return 1 + len(self.chunks)

    async def apply(self, connection: AsyncConnection) -> None:
        if not await _change(connection, self.id, self.bytes, self.detail, self.wanted, self.ended):
            transfers = table_of(TransferRow)
            has = select(transfers.c.state).where(transfers.c.id == self.id)
            state = await connection.scalar(has)
            self.state = None if state is None else TransferState(state)
            return
        await _set_outcomes(connection, self.id, self.chunks)
        chunks = table_of(TransferChunkRow)
        mine = chunks.c.transfer_id == self.id
        await connection.execute(
            update(chunks)
            .where(mine, chunks.c.outcome == Outcome.PENDING.value)
            .values(outcome=self.rest.value)
        )
        state = self.wanted
        if state is None:
            counts = select(func.count(), func.count(case((chunks.c.outcome.in_(_HERE), 1)))).where(
                mine
            )
            state = final_state(*(await connection.execute(counts)).one())
            transfers = table_of(TransferRow)
            await connection.execute(
                update(transfers).where(transfers.c.id == self.id).values(state=state.value)
            )
        await tell(connection, self.log_as, TransferEnded(self.id, self.target, state))
        self.state = state


@dataclass(frozen=True, slots=True)
class ReleaseHold:
    """What an ended transfer holds at its target is given up: its `hold` turns negative."""

    id: str
    target: str
    until: float
    """When it would have ended by itself."""
    log_as: str
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        table = table_of(TransferRow)
        found = await connection.execute(
            update(table)
            .where(table.c.id == self.id, table.c.ended.is_not(None), table.c.hold > 0)
            .values(hold=-table.c.hold)
        )
        if found.rowcount:
            entry = HoldReleased(self.id, self.target, self.until)
            await tell(connection, self.log_as, entry)


@dataclass(slots=True)
class ForgetTransfers:
    """Of those that ended before a time the oldest, and their chunks: a bounded number, since
    nothing else is written meanwhile, and what takes too long would never be."""

    before: float
    rows: int = 1
    more: bool = field(default=False, init=False)
    """Whether others are left, once it was written."""

    async def apply(self, connection: AsyncConnection) -> None:
        transfers, chunks = table_of(TransferRow), table_of(TransferChunkRow)
        old = await connection.scalars(
            select(transfers.c.id)
            .where(transfers.c.ended < self.before)
            .order_by(transfers.c.ended)
            .limit(_MOST_FORGOTTEN + 1)
        )
        ids, forgotten, gone = list(old), 0, 0
        while forgotten < min(len(ids), _MOST_FORGOTTEN) and gone < _MOST_CHUNKS_FORGOTTEN:
            mine = ids[forgotten]
            found = await connection.execute(delete(chunks).where(chunks.c.transfer_id == mine))
            await connection.execute(delete(transfers).where(transfers.c.id == mine))
            forgotten, gone = forgotten + 1, gone + found.rowcount
        self.more = forgotten < len(ids)


async def _change(
    connection: AsyncConnection,
    transfer: str,
    moved: int,
    detail: str,
    state: TransferState | None,
    ended: float | None = None,
) -> bool:
    """False: it has ended, and stays as it is."""
    table = table_of(TransferRow)
    more = case((table.c.moved_bytes < moved, moved), else_=table.c.moved_bytes)
    values: dict[str, Any] = {"moved_bytes": more}
    # Another server may have been told more than this one.
    values |= {"detail": detail} if detail else {}
    values |= {"state": state.value} if state is not None else {}
    values |= {"ended": ended} if ended is not None else {}
    found = await connection.execute(
        update(table).where(table.c.id == transfer, table.c.ended.is_(None)).values(values)
    )
    return bool(found.rowcount)


async def _set_outcomes(connection: AsyncConnection, transfer: str, outcomes: Outcomes) -> None:
    chunks = table_of(TransferChunkRow)
    statement = (
        update(chunks)
        .where(
            chunks.c.transfer_id == bindparam("of_transfer"),
            chunks.c.position == bindparam("at_position"),
        )
        .values(outcome=bindparam("outcome"), source=bindparam("source"))
    )
    rows = (
        {
            "of_transfer": transfer,
            "at_position": position,
            "outcome": outcome,
            "source": source,
        }
        for position, outcome, source in outcomes
    )
    await many(connection, statement, rows)
