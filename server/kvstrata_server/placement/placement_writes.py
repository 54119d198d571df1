"""Placements to SQL, thousands in one statement.

A batch travels as one list of numbers and one piece of bytes, which the database takes apart:
SQLite does it without the GIL, where a row at a time would have to take it again for each, and
neither database parses or plans more than once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import delete, text
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata_server.placement.index import Added, ChunkIds, LocationId, Removed
from kvstrata_server.sql.models import PlacementRow

__all__ = ["AddPlacements", "ClearPlacements", "DropPlacements", "ForgetChunks"]

# Places in the list count from 0 in SQLite and from 1 in PostgreSQL, where a number that servers
# agree on belongs to one key for good.
_PUT_CHUNKS = {
    "sqlite": text(
        "INSERT INTO chunks (id, namespace, chunk)"
        " SELECT value, :namespace, substr(:packed, key * :stride + 1, :stride)"
        " FROM json_each(:ids) WHERE true"
        " ON CONFLICT (id) DO UPDATE SET namespace = excluded.namespace, chunk = excluded.chunk"
    ),
    "postgresql": text(
        "INSERT INTO chunks (id, namespace, chunk)"
        " SELECT value, CAST(:namespace AS BYTEA), substr(CAST(:packed AS BYTEA),"
        " CAST((place - 1) * CAST(:stride AS BIGINT) + 1 AS INT), CAST(:stride AS INT))"
        " FROM unnest(CAST(:ids AS BIGINT[])) WITH ORDINALITY AS listed(value, place)"
        " ON CONFLICT DO NOTHING"
    ),
}
_ADD = {
    "sqlite": text(
        "INSERT INTO placements (location_id, chunk_id)"
        " SELECT :location, value FROM json_each(:ids) WHERE true ON CONFLICT DO NOTHING"
    ),
    "postgresql": text(
        "INSERT INTO placements (location_id, chunk_id)"
        " SELECT CAST(:location AS BIGINT), value"
        " FROM unnest(CAST(:ids AS BIGINT[])) AS listed(value) ON CONFLICT DO NOTHING"
    ),
}
_DROP = {
    "sqlite": text(
        "DELETE FROM placements WHERE location_id = :location"
        " AND chunk_id IN (SELECT value FROM json_each(:ids))"
    ),
    "postgresql": text(
        "DELETE FROM placements WHERE location_id = :location"
        " AND chunk_id = ANY(CAST(:ids AS BIGINT[]))"
    ),
}
_FORGET = text(
    "DELETE FROM chunks WHERE NOT EXISTS"
    " (SELECT 1 FROM placements WHERE placements.chunk_id = chunks.id)"
)


@dataclass(frozen=True, slots=True)
class AddPlacements:
    added: Added

    @property
    def rows(self) -> int:
        return len(self.added) + len(self.added.chunk_ids)

    async def apply(self, connection: AsyncConnection) -> None:
        dialect = connection.dialect.name
        for chunks in self.added.chunks:
            await connection.execute(
                _PUT_CHUNKS[dialect],
                {
                    "ids": _ids(dialect, self.added.chunk_ids[chunks.positions]),
                    "namespace": chunks.namespace,
                    "packed": chunks.packed,
                    "stride": chunks.stride,
                },
            )
        parameters = {"location": self.added.location, "ids": _ids(dialect, self.added.ids)}
        await connection.execute(_ADD[dialect], parameters)


@dataclass(frozen=True, slots=True)
class DropPlacements:
    removed: Removed

    @property
    def rows(self) -> int:
        return len(self.removed)

    async def apply(self, connection: AsyncConnection) -> None:
        dialect = connection.dialect.name
        parameters = {"location": self.removed.location, "ids": _ids(dialect, self.removed.ids)}
        await connection.execute(_DROP[dialect], parameters)


@dataclass(frozen=True, slots=True)
class ClearPlacements:
    location: LocationId
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await connection.execute(
            delete(PlacementRow).where(PlacementRow.location_id == self.location)
        )


@dataclass(frozen=True, slots=True)
class ForgetChunks:
    """Rows that no placement names. Not in SQLite, where their numbers are used again."""

    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await connection.execute(_FORGET)


def _ids(dialect: str, ids: ChunkIds) -> Any:
    numbers = ids.tolist()
    return msgspec.json.encode(numbers).decode() if dialect == "sqlite" else numbers
