"""What the index and the scheduler write to SQL, one small class a change.

A write is immutable and idempotent: applied twice it leaves the same rows. Its `rows` is about
how many rows it touches, which is what the writer's queue is bounded by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import Table, bindparam, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata_server.models import (
    Base,
    HotPrefixRow,
    LocationRow,
    NamespaceRow,
    NodeRow,
    StoreRow,
    TransferChunkRow,
    TransferRow,
)

__all__ = [
    "ChunkOutcome",
    "CountHits",
    "DropLocation",
    "DropNode",
    "ForgetTransfers",
    "Hit",
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
class DropLocation:
    """Its placements have to be gone."""

    id: int
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        table = _table(LocationRow)
        await connection.execute(delete(table).where(table.c.id == self.id))


@dataclass(frozen=True, slots=True)
class DropNode:
    """Its locations have to be gone. It stays while transfers to it are kept."""

    id: str
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        nodes, transfers = _table(NodeRow), _table(TransferRow)
        kept = select(transfers.c.id).where(transfers.c.target == self.id).exists()
        await connection.execute(delete(nodes).where(nodes.c.id == self.id, ~kept))


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that lookups found: its last chunk, its length, and how many could serve it."""

    key: Key
    chunks: int
    nodes: int
    hits: int
    last_hit: float


@dataclass(frozen=True, slots=True)
class CountHits:
    """Adds to the counts. Of the prefixes that were not found since `forget_before` none stay.

    Not idempotent, unlike the others: repeated after a commit whose answer was lost, a count is
    too high.
    """

    hits: Sequence[Hit]
    forget_before: float

    @property
    def rows(self) -> int:
        return len(self.hits)

    async def apply(self, connection: AsyncConnection) -> None:
        table = _table(HotPrefixRow)
        statement: Any = _INSERT[connection.dialect.name](table)
        excluded = statement.excluded
        statement = statement.on_conflict_do_update(
            index_elements=["namespace", "chunk"],
            set_={
                "hits": table.c.hits + excluded.hits,
                "chunks": excluded.chunks,
                "nodes": excluded.nodes,
                "last_hit": excluded.last_hit,
            },
        )
        rows = [
            {
                "namespace": hit.key[:DIGEST_BYTES],
                "chunk": hit.key[DIGEST_BYTES:],
                "chunks": hit.chunks,
                "nodes": hit.nodes,
                "hits": hit.hits,
                "last_hit": hit.last_hit,
            }
            for hit in self.hits
        ]
        await _many(connection, statement, rows)
        await connection.execute(delete(table).where(table.c.last_hit < self.forget_before))


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
    free_only: bool
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
            "free_only": self.free_only,
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
    """The transfer as it stands, and those of its chunks that changed. One that has ended stays as
    it is: a server that started meanwhile may believe that it goes on."""

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
        found = await connection.execute(
            update(transfers)
            .where(transfers.c.id == self.id, transfers.c.ended.is_(None))
            .values(state=self.state, ended=self.ended, moved_bytes=self.bytes, detail=self.detail)
        )
        if not found.rowcount:
            return
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
