"""The index from SQL, at start."""

from __future__ import annotations

import numpy as np
from sqlalchemy import select

from kvstrata.keys import Key
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.placement.index import ChunkIds
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import (
    ChunkRow,
    LocationRow,
    NamespaceRow,
    NodeRow,
    PlacementRow,
    StoreRow,
)

__all__ = ["load"]


async def load(cluster: Cluster, database: Database) -> None:
    """What SQL knows. Nodes count as silent until they speak: it may be long past.

    Other servers may write meanwhile. So locations are read first, and what they belong to after
    them; of nodes that came in between, and have none here, the change log will tell.
    """
    places, namespaces = cluster.places, cluster.namespaces
    locations = await database.rows(select(LocationRow.__table__))
    stores = await database.rows(select(StoreRow.__table__))
    nodes = await database.rows(select(NodeRow.__table__))
    for row in await database.rows(select(NamespaceRow.__table__)):
        namespaces.load(row.digest, row.document)
    located = {row.node_id for row in locations}
    for row in nodes:
        if row.id not in located:
            continue
        cluster.nodes[row.id] = Node(
            id=row.id,
            incarnation=row.incarnation,
            next_seq=row.next_seq,
            peer_address=row.peer_address,
            transports=tuple(row.transports),
            capacity_bytes=row.capacity_bytes,
            gone=row.gone,
            registered=row.registered,
        )
    for row in stores:
        places.load_store(row.id, row.tier)
    for row in locations:
        places.load_location(row.id, row.node_id, row.store_id)
        node = cluster.nodes.get(row.node_id)  # unless it was forgotten in between
        if node is not None and row.store_id is not None and row.attached:
            node.stores[row.store_id] = places.tier(row.store_id)
    if database.shared:
        await _load_keys(cluster, database)
    else:
        await _load_slots(cluster, database)


async def _load_keys(cluster: Cluster, database: Database) -> None:
    statement = select(PlacementRow.location_id, ChunkRow.namespace, ChunkRow.chunk).join(
        ChunkRow, ChunkRow.id == PlacementRow.chunk_id
    )
    async for part in database.stream(statement):
        by_location: dict[int, list[Key]] = {}
        for location, namespace, chunk in part:
            by_location.setdefault(location, []).append(Key(namespace + chunk))
        for location, keys in by_location.items():
            cluster.index.add(location, keys)


async def _load_slots(cluster: Cluster, database: Database) -> None:
    """Numbers of chunks are slots of the index; rows that no placement names are left out."""
    index = cluster.index
    placed: dict[int, list[ChunkIds]] = {}
    named = np.zeros(1 << 12, bool)
    async for part in database.scan(select(PlacementRow.location_id, PlacementRow.chunk_id)):
        rows = np.array(part, np.int64)
        most = int(rows[:, 1].max())
        if most >= len(named):
            named = np.concatenate([named, np.zeros(most + 1, bool)])
        named[rows[:, 1]] = True
        # In the order of the primary key, or nearly so: each location is in one piece.
        starts = np.flatnonzero(np.diff(rows[:, 0], prepend=-1))
        for piece in np.split(rows, starts[1:]):
            placed.setdefault(int(piece[0, 0]), []).append(piece[:, 1].copy())
    async for part in database.scan(select(ChunkRow.id, ChunkRow.namespace, ChunkRow.chunk)):
        used = [row for row in part if row[0] < len(named) and named[row[0]]]
        ids = np.array([row[0] for row in used], np.int64)
        index.load_chunks(ids, index.families.of_keys([row[1] + row[2] for row in used]))
    for location, parts in placed.items():
        index.load_placements(location, np.concatenate(parts))
    index.loaded()
