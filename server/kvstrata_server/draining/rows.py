"""Drains as rows of SQL, for a server that starts and for the others on the same database."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata.api import DrainState, LeftReason
from kvstrata_server.draining.drain import Drain, Move
from kvstrata_server.sql.models import DrainRow

__all__ = ["ForgetDrains", "PutDrain", "drain_of", "put_drain"]


@dataclass(frozen=True, slots=True)
class PutDrain:
    """One that has ended stays as it ended, and one that is not in force any more stays so: a
    server that has not heard of it yet may believe otherwise."""

    values: dict[str, Any]
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        mine = DrainRow.id == self.values["id"]
        if self.values["ended"] is None:
            older = [DrainRow.ended.is_(None), DrainRow.in_force]
        else:
            same = DrainRow.state == self.values["state"]
            older = [DrainRow.in_force, or_(DrainRow.ended.is_(None), same)]
        changed = await connection.execute(update(DrainRow).where(mine, *older).values(self.values))
        if changed.rowcount or await connection.scalar(select(DrainRow.id).where(mine)):
            return
        await connection.execute(insert(DrainRow).values(self.values))


@dataclass(frozen=True, slots=True)
class ForgetDrains:
    """Drop those that ended before."""

    before: float
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        old = DrainRow.ended < self.before
        await connection.execute(delete(DrainRow).where(old, ~DrainRow.in_force))


def put_drain(drain: Drain) -> PutDrain:
    """What people read of it, and what a server needs that goes on with it: what was tried is
    found again."""
    return PutDrain(
        {
            "id": drain.id,
            "node": drain.node,
            "incarnation": drain.incarnation,
            "purpose": drain.purpose,
            "state": drain.state.value,
            "in_force": drain.in_force,
            "created": drain.created,
            "deadline": drain.deadline,
            "ended": drain.ended,
            "detail": drain.detail[:2000],
            "progress": {
                "targets": None if drain.targets is None else list(drain.targets),
                "settled": drain.settled,
                "chunks": drain.chunks,
                "bytes": drain.bytes,
                "left": {why.value: chunks for why, chunks in drain.left.items()},
                "stored": dict(drain.stored),
                "moved": dict(drain.moved),
                "moved_bytes": drain.moved_bytes,
                "moves": {id_: [m.target, m.bytes] for id_, m in drain.moves.items()},
            },
        }
    )


def drain_of(row: Any) -> Drain:
    """As an earlier process, or another server, left it."""
    progress = row.progress
    return Drain(
        id=row.id,
        node=row.node,
        incarnation=row.incarnation,
        purpose=row.purpose,
        created=row.created,
        deadline=row.deadline,
        targets=progress["targets"],
        state=DrainState(row.state),
        in_force=row.in_force,
        ended=row.ended,
        detail=row.detail,
        settled=progress["settled"],
        chunks=progress["chunks"],
        bytes=progress["bytes"],
        left={LeftReason(why): chunks for why, chunks in progress["left"].items()},
        stored=Counter(progress["stored"]),
        moved=Counter(progress["moved"]),
        moved_bytes=progress["moved_bytes"],
        moves={
            id_: Move(target, None, nbytes) for id_, (target, nbytes) in progress["moves"].items()
        },
    )
