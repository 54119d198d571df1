"""What servers that share a database tell each other: entries of `change_log`.

Each writes there, in the transaction that also changes the rows, what nodes told it, and applies
what the others wrote. Transactions with entries come one after the other (`Database.lock`), so
entries become visible in the order of their ids and a reader skips none.

Of transfers and evictions, entries say what others need in order to hand out commands; what they
answer to questions they read from the rows.

A node talks to one server at a time, but may go from one to another while the first still has
something to write. Such a late change must not undo newer ones, so every change of a node is
`Fenced` by what SQL says of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import Double, Executable, cast, delete, extract, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata.api import TransferState
from kvstrata.bulk import BulkChange
from kvstrata_server.sql.models import ChangeRow, NodeRow
from kvstrata_server.sql.writes import Write

__all__ = [
    "Entry",
    "EvictionAnswered",
    "EvictionEnded",
    "EvictionMade",
    "Fenced",
    "Forgotten",
    "Heard",
    "HoldReleased",
    "Left",
    "LogEntry",
    "NodeEntry",
    "Registered",
    "Reported",
    "Seen",
    "TransferAdvanced",
    "TransferEnded",
    "TransferMade",
    "TrimLog",
    "WorkEntry",
    "decode_node",
    "decode_work",
    "newer",
    "newest",
    "tell",
]


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    node: str
    incarnation: str
    registered: float
    peer_address: str | None
    transports: list[str]
    capacity_bytes: int
    stores: dict[str, str]
    version: str = ""


class Left(msgspec.Struct, frozen=True, tag="left"):
    """Taken out of service."""

    node: str
    incarnation: str


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """A report, or all parts of a snapshot in one, with the number that comes after it."""

    node: str
    incarnation: str
    next_seq: int
    snapshot: bool
    changes: list[BulkChange]
    namespaces: list[str]


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """How a node was when it last spoke, `age` seconds before this was written."""

    node: str
    incarnation: str
    age: float
    used_bytes: int
    capacity_bytes: int
    chunks: int
    healthy: bool
    detail: str
    ailing: list[str] = []


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    nodes: list[Heard]


class Forgotten(msgspec.Struct, frozen=True, tag="forgotten"):
    """Removed for having been away for long."""

    node: str


class TransferMade(msgspec.Struct, frozen=True, tag="transfer_made"):
    """What it is, rows say."""

    id: str


class TransferAdvanced(msgspec.Struct, frozen=True, tag="transfer_advanced"):
    """This incarnation of its target works on it; `link` is the source it is counted at, or ""."""

    id: str
    incarnation: str
    link: str
    bytes: int


class TransferEnded(msgspec.Struct, frozen=True, tag="transfer_ended"):
    id: str
    target: str
    state: TransferState


class HoldReleased(msgspec.Struct, frozen=True, tag="hold_released"):
    """The target of an ended transfer has to be told, until then."""

    id: str
    target: str
    until: float


class EvictionMade(msgspec.Struct, frozen=True, tag="eviction_made"):
    """What it is, rows say."""

    id: str


class EvictionAnswered(msgspec.Struct, frozen=True, tag="eviction_answered"):
    """A node need not be asked any more."""

    id: str
    node: str


class EvictionEnded(msgspec.Struct, frozen=True, tag="eviction_ended"):
    """Nobody has to be asked any more."""

    id: str


NodeEntry = Registered | Left | Reported | Seen | Forgotten
WorkEntry = (
    TransferMade
    | TransferAdvanced
    | TransferEnded
    | HoldReleased
    | EvictionMade
    | EvictionAnswered
    | EvictionEnded
)
Entry = NodeEntry | WorkEntry

_node_decoder = msgspec.msgpack.Decoder(NodeEntry)
_work_decoder = msgspec.msgpack.Decoder(WorkEntry)


def decode_node(raw: bytes) -> NodeEntry:
    """Raises msgspec's errors on what no server of this version wrote."""
    return _node_decoder.decode(raw)


def decode_work(raw: bytes) -> WorkEntry | None:
    """None for what nodes told, which may be large, or no server of this version wrote."""
    try:
        return _work_decoder.decode(raw)
    except msgspec.MsgspecError:
        return None


# By the clock of the database, which is one: entries are as old as they have been there, however
# long they waited before or wrong the clock of who wrote them is. They become visible when their
# transaction ends, which is within `batch_seconds` of the writer.
_NOW = cast(extract("epoch", func.statement_timestamp()), Double)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Of servers that share PostgreSQL."""

    server: str
    entry: Entry
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await connection.execute(
            insert(ChangeRow).values(
                server=self.server, time=_NOW, entry=msgspec.msgpack.encode(self.entry)
            )
        )


async def tell(connection: AsyncConnection, server: str, entry: Entry) -> None:
    """Log it, in the transaction of what it is about. No `server`: there is nobody to tell."""
    if server:
        await LogEntry(server, entry).apply(connection)


@dataclass(frozen=True, slots=True)
class TrimLog:
    """Drop what has been there for longer than `age` seconds: who was away for longer loads
    everything again."""

    age: float
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await connection.execute(delete(ChangeRow).where(ChangeRow.time < _NOW - self.age))


@dataclass(frozen=True, slots=True)
class Fenced:
    """Writes about a node, unless SQL has newer ones from another server.

    Either `registered`, the time of a registration, or `next_seq`, the number after a report.
    """

    node: str
    incarnation: str
    writes: Sequence[Write]
    registered: float | None = None
    next_seq: int | None = None

    @property
    def rows(self) -> int:
        return sum(write.rows for write in self.writes)

    async def apply(self, connection: AsyncConnection) -> None:
        found = await connection.execute(
            select(NodeRow.incarnation, NodeRow.next_seq, NodeRow.registered).where(
                NodeRow.id == self.node
            )
        )
        row = found.first()
        if row is not None and not self._is_news(*row):
            return
        for write in self.writes:
            await write.apply(connection)

    def _is_news(self, incarnation: str, next_seq: int, registered: float) -> bool:
        if self.registered is not None:
            return registered <= self.registered
        if incarnation != self.incarnation:
            return False
        return self.next_seq is None or next_seq < self.next_seq


def newest() -> Executable:
    return select(func.coalesce(func.max(ChangeRow.id), 0))


def now_there() -> Executable:
    """One row of one number: the database's time, in seconds since the epoch."""
    return select(_NOW)


def newer(position: int, limit: int) -> Executable:
    """Rows (id, server, entry, age in seconds) after a position, in order."""
    age = (_NOW - ChangeRow.time).label("age")
    return (
        select(ChangeRow.id, ChangeRow.server, ChangeRow.entry, age)
        .where(ChangeRow.id > position)
        .order_by(ChangeRow.id)
        .limit(limit)
    )
