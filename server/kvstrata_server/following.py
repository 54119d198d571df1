"""What servers that share a database tell each other: written to its change log, and read there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from kvstrata import api
from kvstrata.errors import Malformed
from kvstrata.keys import Namespace
from kvstrata_server.changes import (
    Entry,
    Forgotten,
    Heard,
    Left,
    LogEntry,
    Registered,
    Reported,
    Seen,
    decode,
    newer,
    newest,
)
from kvstrata_server.clock import Clock
from kvstrata_server.cluster import Cluster
from kvstrata_server.database import Database
from kvstrata_server.index import HOST
from kvstrata_server.places import PlaceChange
from kvstrata_server.writer import Writer

__all__ = ["LOG_RETENTION", "Follower"]

log = logging.getLogger(__name__)

LOG_RETENTION = 120.0
"""Seconds that entries stay in the log."""

_INTERVAL = 0.2
_PAGE = 200


class Follower:
    """`run` (to be supervised) applies entries by other servers to the cluster, in order;
    `tell` writes who was heard here.

    `name` is this server's in the log. `reload` drops and loads everything: called after the
    database was away for so long that entries may have been dropped unread.
    """

    def __init__(
        self,
        cluster: Cluster,
        database: Database,
        writer: Writer,
        clock: Clock,
        name: str,
        reload: Callable[[], Awaitable[None]],
    ) -> None:
        self.position = 0
        """Id of the last entry that was read."""
        self._cluster = cluster
        self._database = database
        self._writer = writer
        self._clock = clock
        self._name = name
        self._reload = reload
        self._read_at: float | None = None
        self._reading = asyncio.Lock()

    async def begin(self) -> None:
        """To be called before the tables are read: what is both in them and in the log is
        applied twice, which changes nothing."""
        self.position = (await self._database.rows(newest()))[0][0]

    async def run(self) -> None:
        while True:
            if not await self.read():
                await asyncio.sleep(_INTERVAL)

    async def read(self) -> bool:
        """Apply what is new. Returns whether there may be more."""
        async with self._reading:
            return await self._read()

    async def _read(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._read_at is not None and now - self._read_at > LOG_RETENTION / 2:
            log.warning("the change log was not read for %.0f s: loading all", now - self._read_at)
            self._read_at = None
            await self._reload()
        rows = await self._database.rows(newer(self.position, _PAGE))
        self._read_at = now
        for number, server, entry in rows:
            if server != self._name:
                self._follow(number, entry)
                await asyncio.sleep(0)  # a snapshot takes milliseconds: let lookups in between
            self.position = number
        return len(rows) == _PAGE

    def tell(self) -> None:
        """Log the nodes that were heard since the last call; to be called a few times a second."""
        heard = [
            Heard(
                node.id,
                node.incarnation,
                self._cluster.age(node),
                *((h.used_bytes, h.capacity_bytes, h.chunks) if (h := node.host) else (0, 0, 0)),
                node.healthy,
                node.detail,
            )
            for node in self._cluster.take_heard()
        ]
        if heard and self._database.shared:
            self._writer.put(LogEntry(self._name, self._clock(), Seen(heard)))

    def _follow(self, number: int, raw: bytes) -> None:
        try:
            self._apply(decode(raw))
        except (msgspec.MsgspecError, Malformed):
            # By a server of another version. Nodes make up for it: the next report is a gap.
            log.exception("entry %d of the change log can't be read: left out", number)

    def _apply(self, entry: Entry) -> None:
        """Older news than the cluster has is left aside."""
        cluster = self._cluster
        match entry:
            case Registered():
                node = cluster.nodes.get(entry.node)
                if node is None or node.registered <= entry.registered:
                    cluster.enroll(entry)
                    cluster.nodes[entry.node].home = False
            case Left():
                node = cluster.nodes.get(entry.node)
                if node is not None and node.incarnation == entry.incarnation:
                    cluster.leave(node)
            case Reported():
                self._apply_report(entry)
            case Seen():
                for heard in entry.nodes:
                    self._apply_heard(heard)
            case Forgotten():
                cluster.forget(entry.node)

    def _apply_report(self, entry: Reported) -> None:
        cluster, places = self._cluster, self._cluster.places
        node = cluster.nodes.get(entry.node)
        if node is None or node.incarnation != entry.incarnation:
            return
        if entry.next_seq <= node.next_seq:
            return
        families, known = cluster.index.families, places.locations(node.id)
        changes = [
            PlaceChange(location, families.of_runs(change.added), families.of_runs(change.removed))
            for change in entry.changes
            if (location := known.get(None if change.location == HOST else change.location))
            is not None
        ]
        cluster.namespaces.learn([Namespace.parse(text.encode()) for text in entry.namespaces])
        for change in changes:
            cluster.namespaces.mention(families.namespaces(change.added))
        if entry.snapshot:
            places.replace(node.id, {c.location: c.added for c in changes}, cluster.attached)
            node.snapshot_wanted = False
        else:
            places.apply(changes)
        node.next_seq, node.staged, node.home = entry.next_seq, None, False

    def _apply_heard(self, heard: Heard) -> None:
        node = self._cluster.nodes.get(heard.node)
        if node is None or node.incarnation != heard.incarnation:
            return
        seen = self._clock() - heard.age
        if node.last_seen is None or seen >= node.last_seen:
            node.last_seen = seen
            node.healthy, node.detail = heard.healthy, heard.detail
            node.host = api.HostUse(
                used_bytes=heard.used_bytes,
                capacity_bytes=heard.capacity_bytes,
                chunks=heard.chunks,
            )
