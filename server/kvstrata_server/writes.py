"""What the index and the scheduler write to SQL, one small class a change.

A write is immutable and idempotent: applied twice it leaves the same rows. Its `rows` is about
how many rows it touches, which is what the writer's queue is bounded by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Table, bindparam, delete, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata_server.models import (
    Base,
    LocationRow,
    NamespaceRow,
    NodeRow,
    PlacementRow,
    StoreRow,
    TransferChunkRow,
    TransferRow,
)

__all__ = [
    "AddPlacements",
    "ChunkOutcome",
    "ClearPlacements",
    "DropPlacements",
    "ForgetTransfers",
    "PutLocation",
    "PutNamespace",
    "PutNode",
    "PutStore",
    "PutTransfer",
    "SetSeq",
    "UpdateTransfer",
    "Write",
]

# SQLAlchemy prepares parameters on the event loop, about 3 us a row: this many, then others run.
_SLICE = 2_000

# The same words in both, but no common ground in SQLAlchemy.
_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class Write(Protocol):
    @property
    def rows(self) -> int: ...

    async def apply(self, connection: AsyncConnection) -> None: ...


@dataclass(frozen=True, slots=True)
class PutNamespace:
    digest: bytes
    document: bytes | None
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        row = {"digest": self.digest, "document": self.document}
        replaced = () if self.document is None else ("document",)
        await _upsert(connection, NamespaceRow, [row], replaced)


@dataclass(frozen=True, slots=True)
class PutNode:
    id: str
    incarnation: str
    next_seq: int
    peer_address: str | None
    transports: tuple[str, ...]
    capacity_bytes: int
    gone: bool
    registered: float
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        row = {
            "id": self.id,
            "incarnation": self.incarnation,
            "next_seq": self.next_seq,
            "peer_address": self.peer_address,
            "transports": list(self.transports),
            "capacity_bytes": self.capacity_bytes,
            "gone": self.gone,
            "registered": self.registered,
        }
        await _upsert(connection, NodeRow, [row], [name for name in row if name != "id"])


@dataclass(frozen=True, slots=True)
class PutStore:
    id: str
    tier: str
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await _upsert(connection, StoreRow, [{"id": self.id, "tier": self.tier}], ("tier",))


@dataclass(frozen=True, slots=True)
class PutLocation:
    id: int
    node: str
    store: str | None
    attached: bool
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        row = {
            "id": self.id,
            "node_id": self.node,
            "store_id": self.store,
            "attached": self.attached,
        }
        await _upsert(connection, LocationRow, [row], ("attached",))


@dataclass(frozen=True, slots=True)
class AddPlacements:
    location: int
    keys: Sequence[Key]

    @property
    def rows(self) -> int:
        return len(self.keys)

    async def apply(self, connection: AsyncConnection) -> None:
        await _upsert(connection, PlacementRow, _placements(self.location, self.keys), ())


@dataclass(frozen=True, slots=True)
class DropPlacements:
    location: int
    keys: Sequence[Key]

    @property
    def rows(self) -> int:
        return len(self.keys)

    async def apply(self, connection: AsyncConnection) -> None:
        table = _table(PlacementRow)
        statement = delete(table).where(
            table.c.location_id == bindparam("location_id"),
            table.c.namespace == bindparam("namespace"),
            table.c.chunk == bindparam("chunk"),
        )
        await _many(connection, statement, _placements(self.location, self.keys))


@dataclass(frozen=True, slots=True)
class ClearPlacements:
    location: int
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        table = _table(PlacementRow)
        await connection.execute(delete(table).where(table.c.location_id == self.location))


@dataclass(frozen=True, slots=True)
class SetSeq:
    """Written after the placements it covers, in the same transaction or a later one."""

    node: str
    incarnation: str
    next_seq: int
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        table = _table(NodeRow)
        await connection.execute(
            update(table)
            .where(table.c.id == self.node, table.c.incarnation == self.incarnation)
            .values(next_seq=self.next_seq)
        )


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    position: int
    key: Key
    outcome: str
    source: str | None


@dataclass(frozen=True, slots=True)
class PutTransfer:
    id: str
    state: str
    source: str
    target: str
    priority: int
    created: float
    deadline: float
    hold: float
    byte_budget: int | None
    hints: Mapping[str, Any]
    idempotency_key: str | None
    request_digest: bytes
    chunks: Sequence[ChunkOutcome]

    @property
    def rows(self) -> int:
        return 1 + len(self.chunks)

    async def apply(self, connection: AsyncConnection) -> None:
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
            "moved_bytes": 0,
            "detail": "",
            "hints": dict(self.hints),
            "idempotency_key": self.idempotency_key,
            "request_digest": self.request_digest,
        }
        await _upsert(connection, TransferRow, [row], ())
        chunks = [
            {
                "transfer_id": self.id,
                "position": c.position,
                "key": c.key,
                "outcome": c.outcome,
                "source": c.source,
            }
            for c in self.chunks
        ]
        await _upsert(connection, TransferChunkRow, chunks, ())


@dataclass(frozen=True, slots=True)
class UpdateTransfer:
    """The transfer as it stands, and those of its chunks that changed."""

    id: str
    state: str
    ended: float | None
    bytes: int
    detail: str
    chunks: Sequence[ChunkOutcome] = ()

    @property
    def rows(self) -> int:
        return 1 + len(self.chunks)

    async def apply(self, connection: AsyncConnection) -> None:
        transfers, chunks = _table(TransferRow), _table(TransferChunkRow)
        await connection.execute(
            update(transfers)
            .where(transfers.c.id == self.id)
            .values(state=self.state, ended=self.ended, moved_bytes=self.bytes, detail=self.detail)
        )
        statement = (
            update(chunks)
            .where(
                chunks.c.transfer_id == bindparam("of_transfer"),
                chunks.c.position == bindparam("at_position"),
            )
            .values(outcome=bindparam("outcome"), source=bindparam("source"))
        )
        rows = [
            {
                "of_transfer": self.id,
                "at_position": c.position,
                "outcome": c.outcome,
                "source": c.source,
            }
            for c in self.chunks
        ]
        await _many(connection, statement, rows)


@dataclass(frozen=True, slots=True)
class ForgetTransfers:
    """Those that ended before a time; their chunks go with them."""

    before: float
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        table = _table(TransferRow)
        await connection.execute(delete(table).where(table.c.ended < self.before))


def _table(model: type[Base]) -> Table:
    table = model.__table__
    if not isinstance(table, Table):
        raise TypeError(f"{model.__name__} is not mapped to a table")
    return table


def _placements(location: int, keys: Sequence[Key]) -> list[dict[str, Any]]:
    return [
        {"location_id": location, "namespace": key[:DIGEST_BYTES], "chunk": key[DIGEST_BYTES:]}
        for key in keys
    ]


async def _upsert(
    connection: AsyncConnection,
    model: type[Base],
    rows: Sequence[Mapping[str, Any]],
    replaced: Sequence[str],
) -> None:
    """Insert; where the primary key is there already, replace these columns or leave it."""
    table = _table(model)
    statement: Any = _INSERT[connection.dialect.name](table)
    primary = [column.name for column in table.primary_key]
    if replaced:
        statement = statement.on_conflict_do_update(
            index_elements=primary, set_={name: statement.excluded[name] for name in replaced}
        )
    else:
        statement = statement.on_conflict_do_nothing(index_elements=primary)
    await _many(connection, statement, rows)


async def _many(
    connection: AsyncConnection, statement: Any, rows: Sequence[Mapping[str, Any]]
) -> None:
    for start in range(0, len(rows), _SLICE):
        await connection.execute(statement, list(rows[start : start + _SLICE]))
