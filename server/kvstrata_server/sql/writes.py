"""What the index writes to SQL, one small class a change.

A write is immutable and idempotent: applied twice it leaves the same rows. Its `rows` is about
how many rows it touches, which is what the writer's queue is bounded by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from sqlalchemy import Table, delete, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata_server.sql.models import (
    Base,
    HotPrefixRow,
    LocationRow,
    NamespaceRow,
    NodeRow,
    StoreRow,
    TransferRow,
)

__all__ = [
    "CountHits",
    "DropLocation",
    "DropNode",
    "Hit",
    "PutLocation",
    "PutNamespace",
    "PutNode",
    "PutStore",
    "SetSeq",
    "Write",
    "many",
    "table_of",
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
        table = table_of(LocationRow)
        await connection.execute(delete(table).where(table.c.id == self.id))


@dataclass(frozen=True, slots=True)
class DropNode:
    """Its locations have to be gone. It stays while transfers to it are kept."""

    id: str
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        nodes, transfers = table_of(NodeRow), table_of(TransferRow)
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
        table = table_of(HotPrefixRow)
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
        await many(connection, statement, rows)
        await connection.execute(delete(table).where(table.c.last_hit < self.forget_before))


@dataclass(frozen=True, slots=True)
class SetSeq:
    """Written after the placements it covers, in the same transaction or a later one."""

    node: str
    incarnation: str
    next_seq: int
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        table = table_of(NodeRow)
        await connection.execute(
            update(table)
            .where(table.c.id == self.node, table.c.incarnation == self.incarnation)
            .values(next_seq=self.next_seq)
        )


def table_of(model: type[Base]) -> Table:
    """For statements that give plain rows."""
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
    table = table_of(model)
    statement: Any = _INSERT[connection.dialect.name](table)
    primary = [column.name for column in table.primary_key]
    if replaced:
        statement = statement.on_conflict_do_update(
            index_elements=primary, set_={name: statement.excluded[name] for name in replaced}
        )
    else:
        statement = statement.on_conflict_do_nothing(index_elements=primary)
    await many(connection, statement, rows)


async def many(
    connection: AsyncConnection, statement: Any, rows: Iterable[Mapping[str, Any]]
) -> None:
    """One statement for each row. Rows that are made on the way are made a slice at a time."""
    left = iter(rows)
    while part := list(islice(left, _SLICE)):
        await connection.execute(statement, part)
