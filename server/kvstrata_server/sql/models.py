"""The tables. They are written behind the in-process index and stay queryable by people.

    namespaces                what must match for bytes to be interchangeable
    nodes ── locations        what one node reports about its host, or about one store
               │     └─ stores    a mount or bucket that several nodes may share
               └─ placements   one chunk at one location
                     └─ chunks
    hot_prefixes              what lookups found most often
    change_log                what the servers that share a database tell each other
    transfers ── transfer_chunks
    evictions                 chunks that nodes were asked to give up
    drains                    nodes that are to be stopped, and what of theirs is safe elsewhere
    quotas                    how much each tenant may hold and move
    api_tokens                who may ask, as hashes
    audit_log                 who changed what

A store that two nodes share has a location for each: who reported a chunk matters when one of
them sends a snapshot, which must not drop what only the other one knows. A chunk is identified
by (namespace, chunk) with `chunk` = group (4 B) + hash; together they are the key.

`placements` name chunks by number, so that a row takes ten bytes and SQLite appends it. In SQLite
a chunk's number is its slot in the index of the one server, used again once nobody holds the
chunk; a row of `chunks` that no placement names means nothing. Servers that share PostgreSQL
take 63 bits of a hash of the key, which needs no agreement.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Double,
    ForeignKey,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

__all__ = [
    "AuditRow",
    "Base",
    "ChangeRow",
    "ChunkRow",
    "DrainRow",
    "EvictionRow",
    "HotPrefixRow",
    "LocationRow",
    "NamespaceRow",
    "NodeRow",
    "PlacementRow",
    "QuotaRow",
    "StoreRow",
    "TokenRow",
    "TransferChunkRow",
    "TransferRow",
]


# SQLite numbers rows by a column of the type INTEGER only.
_BIG_ID = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    # Named constraints: SQLite can only alter a table by copying it, and Alembic finds what to
    # leave out of the copy by name.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class NamespaceRow(Base):
    __tablename__ = "namespaces"

    digest: Mapped[bytes] = mapped_column(LargeBinary(16), primary_key=True)
    document: Mapped[bytes | None] = mapped_column(LargeBinary)
    """Canonical JSON; NULL until a node reports it."""


class NodeRow(Base):
    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    incarnation: Mapped[str] = mapped_column(String(128))
    next_seq: Mapped[int] = mapped_column(BigInteger)
    """Reports up to here are in `placements`: both change in one transaction."""
    peer_address: Mapped[str | None] = mapped_column(String(255))
    transports: Mapped[list[str]] = mapped_column(JSON)
    capacity_bytes: Mapped[int] = mapped_column(BigInteger)
    gone: Mapped[bool] = mapped_column(Boolean)
    registered: Mapped[float] = mapped_column(Double)


class StoreRow(Base):
    __tablename__ = "stores"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    tier: Mapped[str] = mapped_column(String(64))


class LocationRow(Base):
    __tablename__ = "locations"
    __table_args__ = (UniqueConstraint("node_id", "store_id"),)

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.id"))
    store_id: Mapped[str | None] = mapped_column(ForeignKey("stores.id"))
    """NULL: the node's host memory."""
    attached: Mapped[bool] = mapped_column(Boolean)
    """Whether the node has the store attached now, and so can serve all that is in it."""


class ChunkRow(Base):
    __tablename__ = "chunks"

    id: Mapped[int] = mapped_column(_BIG_ID, primary_key=True, autoincrement=False)
    namespace: Mapped[bytes] = mapped_column(LargeBinary(16), ForeignKey("namespaces.digest"))
    chunk: Mapped[bytes] = mapped_column(LargeBinary(36))


class PlacementRow(Base):
    __tablename__ = "placements"
    # Clustered by the primary key: one B-tree instead of two.
    __table_args__ = ({"sqlite_with_rowid": False},)

    location_id: Mapped[int] = mapped_column(ForeignKey("locations.id"), primary_key=True)
    chunk_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    """Of `chunks`; not declared, since checking it would cost more than the row."""


class HotPrefixRow(Base):
    __tablename__ = "hot_prefixes"
    __table_args__ = ({"sqlite_with_rowid": False},)

    namespace: Mapped[bytes] = mapped_column(LargeBinary(16), primary_key=True)
    chunk: Mapped[bytes] = mapped_column(LargeBinary(36), primary_key=True)
    """The last chunk of the prefix; its hash covers all before it."""
    chunks: Mapped[int] = mapped_column(BigInteger)
    """Length of the prefix."""
    nodes: Mapped[int] = mapped_column(Integer)
    """How many could serve all of it when it was last asked for."""
    hits: Mapped[int] = mapped_column(BigInteger)
    last_hit: Mapped[float] = mapped_column(Double, index=True)


class ChangeRow(Base):
    __tablename__ = "change_log"

    id: Mapped[int] = mapped_column(_BIG_ID, primary_key=True, autoincrement=True)
    server: Mapped[str] = mapped_column(String(32))
    """Who wrote it: the process, not the machine."""
    time: Mapped[float] = mapped_column(Double, index=True)
    entry: Mapped[bytes] = mapped_column(LargeBinary)
    """msgpack, see `changes`."""


class TransferRow(Base):
    __tablename__ = "transfers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    source: Mapped[str] = mapped_column(String(128))
    target: Mapped[str] = mapped_column(ForeignKey("nodes.id"))
    priority: Mapped[int] = mapped_column(Integer)
    created: Mapped[float] = mapped_column(Double)
    deadline: Mapped[float] = mapped_column(Double)
    ended: Mapped[float | None] = mapped_column(Double, index=True)
    hold: Mapped[float] = mapped_column(Double)
    """Seconds after its end; negative: those of a hold that was released, by request."""
    byte_budget: Mapped[int | None] = mapped_column(BigInteger)
    free_only: Mapped[bool] = mapped_column(Boolean)
    moved_bytes: Mapped[int] = mapped_column(BigInteger)
    detail: Mapped[str] = mapped_column(String(2000))
    hints: Mapped[dict[str, Any]] = mapped_column(JSON)
    """What orchestrators paste: `kv_transfer_params` and `router_hint`."""
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    request_digest: Mapped[bytes] = mapped_column(LargeBinary(32))


class TransferChunkRow(Base):
    __tablename__ = "transfer_chunks"
    __table_args__ = ({"sqlite_with_rowid": False},)

    transfer_id: Mapped[str] = mapped_column(
        ForeignKey("transfers.id", ondelete="CASCADE"), primary_key=True
    )
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    """Place in the request; the engine's order of the prefix."""
    key: Mapped[bytes] = mapped_column(LargeBinary(52))
    outcome: Mapped[str] = mapped_column(String(16))
    source: Mapped[str | None] = mapped_column(String(128))


class EvictionRow(Base):
    __tablename__ = "evictions"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    created: Mapped[float] = mapped_column(Double)
    deadline: Mapped[float] = mapped_column(Double)
    ended: Mapped[float | None] = mapped_column(Double, index=True)
    what: Mapped[dict[str, Any]] = mapped_column(JSON)
    """Keys, namespaces and tiers, while it runs."""
    nodes: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    """What each node dropped."""
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    request_digest: Mapped[bytes | None] = mapped_column(LargeBinary(32))


class QuotaRow(Base):
    __tablename__ = "quotas"

    tenant: Mapped[str] = mapped_column(String(255), primary_key=True)
    """As in the documents of its namespaces; empty for those that have none."""
    max_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """NULL, here and below: no bound."""
    max_transfers: Mapped[int | None] = mapped_column(BigInteger)
    max_transfer_bytes: Mapped[int | None] = mapped_column(BigInteger)
    changed: Mapped[float] = mapped_column(Double)


class DrainRow(Base):
    __tablename__ = "drains"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    node: Mapped[str] = mapped_column(String(128), index=True)
    incarnation: Mapped[str] = mapped_column(String(128))
    purpose: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    in_force: Mapped[bool] = mapped_column(Boolean, index=True)
    """Whether the node takes nothing new for it: until it is cancelled or the node starts anew."""
    created: Mapped[float] = mapped_column(Double)
    deadline: Mapped[float] = mapped_column(Double)
    ended: Mapped[float | None] = mapped_column(Double, index=True)
    detail: Mapped[str] = mapped_column(String(2000))
    progress: Mapped[dict[str, Any]] = mapped_column(JSON)
    """What was written back and moved, and what was left at the end."""


class TokenRow(Base):
    __tablename__ = "api_tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(128))
    role: Mapped[str] = mapped_column(String(16))
    tenants: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """NULL: all of them."""
    node: Mapped[str | None] = mapped_column(String(128))
    """NULL: in the name of any node."""
    digest: Mapped[bytes] = mapped_column(LargeBinary(32))
    """SHA-256 of the token, which is kept nowhere."""
    created: Mapped[float] = mapped_column(Double)
    expires: Mapped[float | None] = mapped_column(Double)
    revoked: Mapped[float | None] = mapped_column(Double)


class AuditRow(Base):
    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    time: Mapped[float] = mapped_column(Double, index=True)
    actor: Mapped[str] = mapped_column(String(128))
    """Name of the token."""
    client: Mapped[str] = mapped_column(String(64))
    """Address the request came from."""
    operation: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(255))
    status: Mapped[int] = mapped_column(Integer)
    """As in HTTP; those of 400 and more changed nothing."""
