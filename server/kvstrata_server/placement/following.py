"""What servers that share a database tell each other: written to its change log, and read there.

What nodes told another server is applied to the cluster. What became of transfers and evictions
goes to those who keep them, also where this server wrote it: only then is it sure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from kvstrata import api
from kvstrata.errors import Busy, Malformed
from kvstrata.keys import Namespace
from kvstrata_server.clock import Clock
from kvstrata_server.placement.cluster import Cluster
from kvstrata_server.placement.index import HOST
from kvstrata_server.placement.places import PlaceChange
from kvstrata_server.sql.changes import (
    Forgotten,
    Heard,
    Left,
    LogEntry,
    NodeEntry,
    Registered,
    Reported,
    Seen,
    WorkEntry,
    decode_node,
    decode_work,
    newer,
    newest,
)
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.writer import Writer

__all__ = ["LOG_RETENTION", "Follower", "Work"]

log = logging.getLogger(__name__)

LOG_RETENTION = 120.0
"""Seconds that entries stay in the log."""

_INTERVAL = 0.2
_WAITS = (0.0, 0.1, 0.3)
_PAGE = 200


class Work(Protocol):
    """What servers do together: each has in memory all that is not done."""

    async def take_up(self, entries: Iterable[WorkEntry]) -> None:
        """Read from SQL what is new by these, before they are followed."""
        ...

    def follow(self, entry: WorkEntry, ours: bool) -> None:
        """This took effect, by this server (`ours`) or another. Twice does no harm."""
        ...


class Follower:
    """`run` (to be supervised) applies entries by other servers to the cluster, in order, and those
    by all servers to `work`; `tell` writes who was heard here.

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
        work: Sequence[Work] = (),
    ) -> None:
        self.position = 0
        """Id of the last entry that was read."""
        self._cluster = cluster
        self._database = database
        self._writer = writer
        self._clock = clock
        self._name = name
        self._reload = reload
        self._work = work
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._page = _PAGE

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

    async def catch_up(self, node_id: str, incarnation: str) -> None:
        """Before a node is told that it isn't known: it may have registered at another server a
        moment ago, which has still to write that. Raises `Busy`."""
        for wait in _WAITS if self._database.shared else ():
            node = self._cluster.nodes.get(node_id)
            if node is not None and node.incarnation == incarnation and not node.gone:
                return
            await asyncio.sleep(wait)
            while await self.read():
                pass

    async def _read(self) -> bool:
        now = asyncio.get_running_loop().time()
        if self._read_at is not None and now - self._read_at > LOG_RETENTION / 2:
            log.warning("the change log was not read for %.0f s: loading all", now - self._read_at)
            self._read_at = None
            await self._reload()
        page = self._page
        try:
            rows = await self._database.rows(newer(self.position, page))
        except Busy:
            # Entries may be megabytes each: fewer of them may be read in time.
            self._page = max(1, page // 4)
            raise
        self._page = min(_PAGE, 2 * page)
        found = [(row.id, row.server == self._name, row.entry) for row in rows]
        entries = [(number, ours, decode_work(raw), raw) for number, ours, raw in found]
        if new := [entry for _, _, entry, _ in entries if entry is not None]:
            for work in self._work:
                await work.take_up(new)
        self._read_at = now
        for number, ours, entry, raw in entries:
            if entry is not None:
                for work in self._work:
                    work.follow(entry, ours)
            elif not ours:
                self._follow(number, raw)
                await asyncio.sleep(0)  # a snapshot takes milliseconds: let lookups in between
            self.position = number
        return len(rows) == page

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
            self._writer.put(LogEntry(self._name, Seen(heard)))

    def _follow(self, number: int, raw: bytes) -> None:
        try:
            self._apply(decode_node(raw))
        except (msgspec.MsgspecError, Malformed):
            # By a server of another version. Nodes make up for it: the next report is a gap.
            log.exception("entry %d of the change log can't be read: left out", number)

    def _apply(self, entry: NodeEntry) -> None:
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
