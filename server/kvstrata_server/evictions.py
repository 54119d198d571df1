"""Evictions: chunks that nodes are asked to give up, and what each of them says it dropped.

    state      event                                                   next
    -          POST                                                    running
    running    a node posts its result, others have not                running
    running    the last node posts, all could                          done
                                    some could not                     partial
    running    its deadline                                            expired
    any other  anything                                                unchanged

Nodes poll for them as for transfers. One that is silent may get the command when it is back, until
the deadline; after that nobody asks it any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from kvstrata import api
from kvstrata.api import EvictionState
from kvstrata.errors import Busy, Missing
from kvstrata_server.clock import Clock
from kvstrata_server.cluster import Cluster, Node
from kvstrata_server.database import Database
from kvstrata_server.models import EvictionRow
from kvstrata_server.writer import Writer

__all__ = ["Evictions"]

_MOST_ACTIVE = 1000
_MOST_KEYS = 4_000_000
_MOST_KEYS_PER_POLL = api.MAX_KEYS
_COMMIT_TIMEOUT = 10.0
_REDELIVERY = 5.0


@dataclass(slots=True)
class _Eviction:
    id: str
    state: EvictionState
    created: float
    deadline: float
    what: dict[str, list[str]]
    """`keys`, `digests` and `tiers` of the command."""
    nodes: dict[str, api.NodeEviction]
    ended: float | None = None
    offered: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Node -> when, and to which incarnation."""

    def info(self) -> api.EvictionInfo:
        return api.EvictionInfo(
            id=self.id,
            state=self.state,
            created=self.created,
            deadline=self.deadline,
            ended=self.ended,
            nodes=list(self.nodes.values()),
        )

    def waits_for(self, node_id: str) -> bool:
        at = self.nodes.get(node_id)
        return at is not None and at.dropped is None and not at.detail

    def row(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "state": self.state.value,
            "created": self.created,
            "deadline": self.deadline,
            "ended": self.ended,
            # What was asked for is of no use once it is over, and may be large.
            "what": {} if self.state.ended else self.what,
            "nodes": [node.model_dump() for node in self.nodes.values()],
        }


@dataclass(frozen=True, slots=True)
class _Put:
    """One that has ended stays as it is: a server that started later may believe that it runs."""

    values: dict[str, Any]
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        mine = EvictionRow.id == self.values["id"]
        changed = await connection.execute(
            update(EvictionRow).where(mine, EvictionRow.ended.is_(None)).values(self.values)
        )
        if changed.rowcount or await connection.scalar(select(EvictionRow.id).where(mine)):
            return
        await connection.execute(insert(EvictionRow).values(self.values))


@dataclass(frozen=True, slots=True)
class _Forget:
    before: float
    rows: int = 1

    async def apply(self, connection: AsyncConnection) -> None:
        await connection.execute(delete(EvictionRow).where(EvictionRow.ended < self.before))


class Evictions:
    """Those that run, in memory and in SQL; ended ones are read from SQL. `wake(node)` ends the
    long poll of a node that has something to do."""

    def __init__(
        self,
        cluster: Cluster,
        database: Database,
        writer: Writer,
        clock: Clock,
        retention: float,
        wake: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._database = database
        self._writer = writer
        self._clock = clock
        self._retention = retention
        self._wake = wake
        self._active: dict[str, _Eviction] = {}

    async def load(self) -> None:
        """Take up what had not ended when the last process did."""
        running = EvictionRow.state == EvictionState.RUNNING.value
        for row in await self._database.rows(select(EvictionRow.__table__).where(running)):
            self._active[row.id] = _loaded(row)

    async def create(self, asked: api.EvictionRequest) -> api.EvictionInfo:
        """Raises `Missing` for nodes and models that nobody knows, `Busy`."""
        what = self._what(asked)
        if asked.nodes is None:
            nodes = [node.id for node in self._cluster.up()]
        else:
            nodes = [self._cluster.require(node).id for node in dict.fromkeys(asked.nodes)]
        if not nodes:
            raise Missing("no node is up that could be asked")
        if len(self._active) >= _MOST_ACTIVE:
            raise Busy(f"{len(self._active)} evictions are under way: try again later")
        keys = sum(len(eviction.what["keys"]) for eviction in self._active.values())
        if keys and keys + len(what["keys"]) > _MOST_KEYS:
            raise Busy(f"{keys} keys are to be evicted: try again later")
        self._writer.require_room()
        now = self._clock()
        eviction = _Eviction(
            id=f"{int(now * 1000):012x}-{secrets.token_hex(8)}",
            state=EvictionState.RUNNING,
            created=now,
            deadline=now + asked.deadline,
            what=what,
            nodes={node: api.NodeEviction(node=node) for node in nodes},
        )
        self._active[eviction.id] = eviction
        self._writer.put(_Put(eviction.row()))
        for node in nodes:
            self._wake(node)
        await self._writer.flushed(_COMMIT_TIMEOUT)
        return eviction.info()

    async def get(self, eviction_id: str) -> api.EvictionInfo:
        self.expire()
        if eviction_id in self._active:
            return self._active[eviction_id].info()
        await self._writer.flushed(_COMMIT_TIMEOUT)
        wanted = EvictionRow.id == eviction_id
        rows = await self._database.rows(select(EvictionRow.__table__).where(wanted))
        if not rows:
            raise Missing(f"no eviction {eviction_id!r}, or it ended too long ago")
        return _loaded(rows[0]).info()

    async def page(self, after: str | None, limit: int) -> api.EvictionList:
        """Oldest first."""
        self.expire()
        await self._writer.flushed(_COMMIT_TIMEOUT)
        rows = await self._database.rows(
            select(EvictionRow.__table__)
            .where(EvictionRow.id > (after or ""))
            .order_by(EvictionRow.id)
            .limit(limit + 1)
        )
        shown = [_loaded(row).info() for row in rows[:limit]]
        return api.EvictionList(evictions=shown, next=shown[-1].id if len(rows) > limit else None)

    def commands(self, node: Node) -> list[api.Command]:
        """What this node should drop and was not told of lately."""
        self.expire()
        now = self._clock()
        due: list[api.Command] = []
        room = _MOST_KEYS_PER_POLL
        for eviction in self._active.values():
            if not eviction.waits_for(node.id):
                continue
            when, to = eviction.offered.get(node.id, (0.0, ""))
            if to == node.incarnation and now - when < _REDELIVERY:
                continue
            room -= len(eviction.what["keys"])
            if due and room < 0:
                break
            eviction.offered[node.id] = now, node.incarnation
            due.append(
                api.Command(
                    kind="evict",
                    transfer=eviction.id,
                    deadline_in=eviction.deadline - now,
                    keys=eviction.what["keys"],
                    digests=eviction.what["digests"],
                    tiers=eviction.what["tiers"],
                )
            )
        return due

    async def result(
        self, node_id: str, eviction_id: str, result: api.EvictionResult
    ) -> api.EvictionInfo:
        """A node says what it did. Again, or too late: nothing changes. Raises `Missing`, or `Busy`
        where another server runs it."""
        self._cluster.require_current(node_id, result.incarnation)
        self.expire()
        eviction = self._active.get(eviction_id)
        if eviction is None:
            known = await self.get(eviction_id)
            if not known.state.ended:
                raise Busy(f"another server of this database runs eviction {eviction_id}: tell it")
            return known
        if node_id not in eviction.nodes:
            raise Missing(f"eviction {eviction_id} does not ask node {node_id!r}")
        if eviction.waits_for(node_id):
            detail = result.detail if result.dropped is None else ""
            eviction.nodes[node_id] = api.NodeEviction(
                node=node_id,
                dropped=result.dropped,
                detail=detail or ("" if result.dropped is not None else "it did not say why"),
            )
            if not any(eviction.waits_for(node) for node in eviction.nodes):
                failed = any(node.dropped is None for node in eviction.nodes.values())
                self._end(eviction, EvictionState.PARTIAL if failed else EvictionState.DONE)
            else:
                self._writer.put(_Put(eviction.row()))
            await self._writer.flushed(_COMMIT_TIMEOUT)
        return eviction.info()

    def expire(self) -> None:
        """End what is past its deadline."""
        now = self._clock()
        for eviction in [e for e in self._active.values() if e.deadline <= now]:
            self._end(eviction, EvictionState.EXPIRED)

    def forget_old(self) -> None:
        self._writer.put(_Forget(self._clock() - self._retention))

    def _end(self, eviction: _Eviction, state: EvictionState) -> None:
        eviction.state, eviction.ended = state, self._clock()
        del self._active[eviction.id]
        self._writer.put(_Put(eviction.row()))

    def _what(self, asked: api.EvictionRequest) -> dict[str, list[str]]:
        chunks = asked.chunks
        keys = chunks.keys if isinstance(chunks, api.OfKeys) else []
        digests: Sequence[str] = chunks.digests if isinstance(chunks, api.OfNamespaces) else []
        if isinstance(chunks, api.OfModel):
            digests = self._cluster.namespaces.of_model(chunks.model, chunks.revision)
            if not digests:
                raise Missing(
                    f"no namespace of model {chunks.model!r}, in that revision, is known here: "
                    "GET /v1/namespaces shows them"
                )
        return {
            "keys": list(dict.fromkeys(keys)),
            "digests": list(dict.fromkeys(digests)),
            "tiers": list(dict.fromkeys(asked.tiers or [])),
        }


def _loaded(row: Any) -> _Eviction:
    nodes = [api.NodeEviction.model_validate(node) for node in row.nodes]
    return _Eviction(
        id=row.id,
        state=EvictionState(row.state),
        created=row.created,
        deadline=row.deadline,
        what=row.what,
        nodes={node.node: node for node in nodes},
        ended=row.ended,
    )
