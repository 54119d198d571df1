"""What servers that share a database tell each other: written to its change log, and read there.

What nodes told another server is applied to the cluster. What became of transfers and evictions
goes to those who keep them, also where this server wrote it: only then is it sure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata import api
from kvstrata.errors import Busy, Malformed
from kvstrata_server.clock import Clock
from kvstrata_server.placement.cluster import Cluster
from kvstrata_server.placement.reports import Reports
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
# Who has not read the log to its end for so long does not know what others were told.
_CURRENT = 2.0
_PAGE = 200


class Work(Protocol):
    """What servers do together: each has in memory all that is not done."""

    async def take_up(self, entries: Iterable[WorkEntry]) -> None:
        """Read from SQL what is new by these, before they are followed."""
        ...

    def follow(self, entry: WorkEntry, ours: bool) -> None:
        """This took effect, by this server (`ours`) or another. Twice does no harm."""
        ...


@dataclass(slots=True)
class _TellHeard:
    """Logs which nodes were heard. It may wait for SQL: it says what is so when its turn comes, of
    all that were heard until then."""

    server: str
    cluster: Cluster
    heard: set[str] = field(default_factory=set)
    """Also by an attempt before, of which nobody knows whether it came to its end."""
    begun: bool = False
    """Its turn has come: who is heard from now on may be left to another."""
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        self.begun = True
        self.heard |= self.cluster.take_heard()
        seen = [
            Heard(
                node.id,
                node.incarnation,
                self.cluster.age(node),
                *((h.used_bytes, h.capacity_bytes, h.chunks) if (h := node.host) else (0, 0, 0)),
                node.healthy,
                node.detail,
                list(node.ailing),
            )
            for node in map(self.cluster.nodes.get, self.heard)
            if node is not None and not node.gone
        ]
        if seen:
            await LogEntry(self.server, Seen(seen)).apply(connection)


class Follower:
    """`run` (to be supervised) applies entries by other servers to the cluster, in order, and those
    by all servers to `work`; `tell` writes who was heard here.

    `name` is this server's in the log. `reload` drops and loads everything: called after the
    database was away for so long that entries may have been dropped unread.
    """

    def __init__(
        self,
        cluster: Cluster,
        reports: Reports,
        database: Database,
        writer: Writer,
        clock: Clock,
        name: str,
        reload: Callable[[], Awaitable[None]],
        work: Sequence[Work] = (),
    ) -> None:
        self.position = 0
        """Id of the last entry that was read."""
        self.problem = ""
        """Why the last attempt to read failed; empty if it didn't."""
        self._cluster = cluster
        self._reports = reports
        self._database = database
        self._writer = writer
        self._clock = clock
        self._name = name
        self._reload = reload
        self._work = work
        self._behind = False
        """Whether entries may have been dropped unread, and not all was loaded since."""
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._page = _PAGE
        self._current: tuple[float, float] | None = None
        """Since when the log was always read to its end, and when it was last."""
        self._telling: _TellHeard | None = None

    async def begin(self) -> None:
        """To be called before the tables are read: what is both in them and in the log is
        applied twice, which changes nothing."""
        self.position = (await self._database.rows(newest()))[0][0]

    async def run(self) -> None:
        """For ever. A database that is away, or slow, is asked again."""
        while True:
            try:
                more = await self.read()
            except Busy as e:
                if not self.problem:
                    log.warning("what other servers were told can't be read: %s", e)
                self.problem, more = str(e), False
            else:
                self.problem = ""
            if not more:
                await asyncio.sleep(_INTERVAL)

    async def read(self) -> bool:
        """Apply what is new. Returns whether there may be more."""
        async with self._reading:
            return await self._read()

    def require_loaded(self) -> None:
        """Raises `Busy` while all is loaded again: what a node says then would be undone by what
        SQL said before."""
        if self._behind:
            raise Busy(
                "this server loads what others were told while it was cut off: send this again in "
                "a moment, or to another server"
            )

    async def catch_up(self, node_id: str, incarnation: str) -> None:
        """Before a node is told that it isn't known: it may have registered at another server a
        moment ago, which has still to write that. Raises `Busy`."""
        self.require_loaded()
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
            self._read_at, self._behind = None, True
        if self._behind:
            await self._reload()
            self._behind = False
        page, began = self._page, self._clock()
        try:
            rows = await self._database.rows(newer(self.position, page))
        except Busy:
            # Entries may be megabytes each: fewer of them may be read in time.
            self._page = max(1, page // 4)
            raise
        self._page = min(_PAGE, 2 * page)
        entries = [(row, decode_work(row.entry)) for row in rows]
        if new := [entry for _, entry in entries if entry is not None]:
            for work in self._work:
                await work.take_up(new)
        self._read_at = now
        for row, entry in entries:
            ours = row.server == self._name
            if entry is not None:
                for work in self._work:
                    work.follow(entry, ours)
            elif not ours:
                self._follow(row.id, row.entry, row.age)
                await asyncio.sleep(0)  # a snapshot takes milliseconds: let lookups in between
            self.position = row.id
        if len(rows) < page:
            since = self.current_since
            self._current = began if since is None else since, began
        return len(rows) == page

    @property
    def current_since(self) -> float | None:
        """From when on this server knew what the others had written a moment before; None: it
        doesn't now."""
        if self._current is None or self._clock() - self._current[1] > _CURRENT:
            return None
        return self._current[0]

    def tell(self) -> None:
        """Log the nodes that were heard since the last call, unless such an entry waits for SQL;
        to be called a few times a second."""
        waits = self._telling is not None and not self._telling.begun
        if self._database.shared and self._cluster.heard and not waits:
            self._telling = _TellHeard(self._name, self._cluster)
            self._writer.put(self._telling)

    def _follow(self, number: int, raw: bytes, age: float) -> None:
        try:
            self._apply(decode_node(raw), age)
        except (msgspec.MsgspecError, Malformed):
            # By a server of another version. Nodes make up for it: the next report is a gap.
            log.exception("entry %d of the change log can't be read: left out", number)

    def _apply(self, entry: NodeEntry, age: float) -> None:
        """Older news than the cluster has is left aside. `age`: seconds since it was logged."""
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
                self._reports.follow(entry)
            case Seen():
                for heard in entry.nodes:
                    self._apply_heard(heard, age)
            case Forgotten():
                cluster.forget(entry.node)

    def _apply_heard(self, heard: Heard, age: float) -> None:
        node = self._cluster.nodes.get(heard.node)
        if node is None or node.incarnation != heard.incarnation:
            return
        seen = self._clock() - heard.age - max(0.0, age)
        if node.last_seen is None or seen >= node.last_seen:
            node.last_seen = seen
            node.healthy, node.detail, node.ailing = heard.healthy, heard.detail, heard.ailing
            node.host = api.HostUse(
                used_bytes=heard.used_bytes,
                capacity_bytes=heard.capacity_bytes,
                chunks=heard.chunks,
            )
