"""The drains in force, in memory and in SQL, where a server that starts finds them.

Servers that share a database write them for each other, and look every second for what the others
wrote. Of those servers the one that the node talks to does the work.

    written by another one         here         then
    one that isn't known here      none         taken up, unless it was cancelled here since
    one that is known, and ended   goes on      as written
    one that goes on               goes on      as written, unless its node talks to this server
    a later one of the same node   any          replaces it
    not in force any more          in force     dropped, unless this server's word is on its way
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import select

from kvstrata.api import DrainState
from kvstrata.errors import Busy, Missing
from kvstrata_server.clock import Clock
from kvstrata_server.draining.drain import Drain
from kvstrata_server.draining.rows import ForgetDrains, PutDrain, drain_of, put_drain
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import DrainRow
from kvstrata_server.sql.writer import Writer

__all__ = ["InForce"]

_COMMIT_TIMEOUT = 10.0
_REFRESH = 1.0
# After so long without a word from SQL others may have begun some that this server doesn't know.
_STALE = 5.0
# Of so many drains that are not in force any more it is remembered what was put last.
_REMEMBERED = 100


class InForce:
    """By node: each has one at most. `on_news` is called when another server changed one."""

    def __init__(
        self,
        cluster: Cluster,
        database: Database,
        writer: Writer,
        clock: Clock,
        on_news: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._database = database
        self._writer = writer
        self._clock = clock
        self._on_news = on_news
        self._drains: dict[str, Drain] = {}
        self._put: dict[str, tuple[PutDrain, int]] = {}
        """By drain what was last put, and the writer's position then."""
        self._refreshed = float("-inf")
        self._read = float("-inf")
        """When it was last asked of SQL, and when that last answered."""

    def __iter__(self) -> Iterator[Drain]:
        """As they are now: they may change meanwhile."""
        return iter(list(self._drains.values()))

    def get(self, node_id: str) -> Drain | None:
        return self._drains.get(node_id)

    def adopt(self, drain: Drain) -> None:
        drain.active = self._clock()
        self._drains[drain.node] = drain
        node = self.node_of(drain)
        if node is not None:
            node.drain = drain.state

    def drop(self, drain: Drain) -> None:
        if self._drains.get(drain.node) is drain:
            del self._drains[drain.node]
        node = self.node_of(drain)
        if node is not None:
            node.drain = None

    def goes_on(self, drain: Drain) -> bool:
        """It may have ended, or been replaced, while something was waited for."""
        return self._drains.get(drain.node) is drain and not drain.state.ended

    def node_of(self, drain: Drain) -> Node | None:
        """The node as it was when the drain began; None if it is that no more."""
        node = self._cluster.nodes.get(drain.node)
        is_same = node is not None and not node.gone and node.incarnation == drain.incarnation
        return node if is_same else None

    def is_ours(self, node: Node) -> bool:
        """Whether the node talks to this server."""
        return not self._database.shared or node.heard_here >= (node.last_seen or 0.0) > 0.0

    def hears_all(self, node: Node | None) -> bool:
        """Whether no other server can know better whether this node left or started anew."""
        return not self._database.shared or (node is not None and self.is_ours(node))

    # ------------------------------------------------------------ SQL

    @property
    def is_current(self) -> bool:
        """Whether this server knows of all of them but those of the last seconds."""
        return not self._database.shared or self._clock() - self._read <= _STALE

    async def load(self) -> None:
        """Take up what SQL has, and set it anew at nodes that were loaded anew."""
        self._read = self._clock()
        for row in await self._rows(DrainRow.in_force):
            self.adopt(self._drains.get(row.node) or drain_of(row))

    async def latest(self, node_id: str) -> Drain:
        """Also one that isn't in force. Raises `Missing` if there is none, `Busy`."""
        await self._writer.flushed(_COMMIT_TIMEOUT)
        rows = await self._rows(DrainRow.node == node_id, limit=1)
        if not rows:
            raise Missing(f"node {node_id!r} was not drained, or that is too long ago")
        return drain_of(rows[0])

    def write(self, drain: Drain) -> None:
        """Where that is news."""
        put = put_drain(drain)
        before = self._put.get(drain.id)
        if before is None or before[0] != put:
            self._writer.put(put)
            self._put[drain.id] = put, self._writer.position
            while len(self._put) > len(self._drains) + _REMEMBERED:
                del self._put[next(iter(self._put))]

    async def written(self) -> None:
        """Until SQL has what was put. Raises `Busy` if it doesn't take it."""
        await self._writer.flushed(_COMMIT_TIMEOUT)

    def forget_old(self, before: float) -> None:
        """Those that ended before then, and are not in force."""
        self._writer.put(ForgetDrains(before))

    async def _rows(self, condition: Any, limit: int = 10_000) -> list[Any]:
        """The latest last; of a limited number the latest."""
        rows = await self._database.rows(
            select(DrainRow.__table__).where(condition).order_by(DrainRow.id.desc()).limit(limit)
        )
        return list(reversed(rows))

    # ------------------------------------------------------------ the other servers

    async def knows_of_others(self, drain: Drain) -> bool:
        """Whether this server has read of those drains that may count on this one's node, and this
        one is in SQL for theirs to read: of two that count on each other, one learns of it."""
        if not self._database.shared:
            return True
        found = await self.refresh(at_once=True)
        return drain.node in found and found[drain.node].id == drain.id

    async def refresh(self, at_once: bool = False) -> dict[str, Drain]:
        """What the other servers wrote, unless that was read a moment ago; by node what is in
        force, as read."""
        now = self._clock()
        if not self._database.shared or (abs(now - self._refreshed) < _REFRESH and not at_once):
            return {}
        self._refreshed = now
        committed = self._writer.committed
        found: dict[str, Drain] = {}
        try:
            for row in await self._rows(DrainRow.in_force):
                if row.node in found:
                    self._replaced(found[row.node])
                found[row.node] = drain_of(row)
        except Busy:
            return {}  # they are as they were
        self._read = now
        for drain in self:
            there = found.get(drain.node)
            is_same = there is not None and there.id == drain.id
            is_replaced = there is not None and there.id > drain.id
            if is_replaced or (not is_same and self._is_read(drain, committed)):
                drain.in_force = False
                self.drop(drain)
        for node_id, drain in found.items():
            ours = self._drains.get(node_id)
            if ours is None:
                is_news = self._is_read(drain, committed)  # not cancelled here since
            else:
                is_news = ours.id == drain.id and self._is_behind(ours, drain)
            if is_news:
                self.adopt(drain)
                self._on_news()
        return found

    def _is_read(self, drain: Drain, committed: int) -> bool:
        """Whether what was read has what this server put of it, if it did."""
        put = self._put.get(drain.id)
        return put is None or committed >= put[1]

    def _replaced(self, drain: Drain) -> None:
        """Two servers were asked at the same time, and the later one's goes on."""
        drain.in_force = False
        if not drain.state.ended:
            drain.state, drain.ended = DrainState.CANCELLED, self._clock()
            drain.detail = "replaced: another server was asked for one, too"
        self.write(drain)

    def _is_behind(self, ours: Drain, written: Drain) -> bool:
        """Whether another server has got on with it."""
        if written.state.ended != ours.state.ended:
            return written.state.ended
        node = self.node_of(ours)
        return node is None or not self.is_ours(node)
