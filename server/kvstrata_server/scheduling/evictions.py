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

In memory is what has to be handed out; questions are answered from SQL, and of one that is over
once SQL says so. Servers that share a database have the same ones in memory, and hear by the change
log who has answered elsewhere.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from kvstrata import api
from kvstrata.api import EvictionState
from kvstrata.api.evictions import MAX_NODES
from kvstrata.errors import Busy, Malformed, Missing
from kvstrata_server.clock import Clock
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.problems import Conflict
from kvstrata_server.scheduling import eviction as stored
from kvstrata_server.scheduling.eviction import (
    AnswerEviction,
    Eviction,
    ExpireEviction,
    ForgetEvictions,
    PutEviction,
    Shed,
    read_infos,
    what_to_shed,
)
from kvstrata_server.sql.changes import EvictionAnswered, EvictionEnded, EvictionMade, WorkEntry
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import EvictionRow
from kvstrata_server.sql.writer import Writer

__all__ = ["Evictions", "Shed"]

_MOST_ACTIVE = 1000
_MOST_KEYS = 4_000_000
_MOST_KEYS_PER_POLL = api.MAX_KEYS
_MOST_NODES_PER_PAGE = 20_000
_PER_READ = 20
_COMMIT_TIMEOUT = 10.0
_REDELIVERY = 5.0
# What was read from SQL may be older than an end that was heard of so long ago.
_OVER = 60.0


@dataclass(slots=True)
class _Making:
    """One that SQL may not have yet."""

    write: PutEviction
    position: int
    """Of the writer, with which it has."""
    eviction: Eviction
    """Without the nodes that another server asked, and which were faster than this one."""


class Evictions:
    """Those that run, in memory and in SQL; ended ones are in SQL. `wake(node)` ends the long poll
    of a node that has something to do. `log_as`: this server's name in the change log; empty: it
    has the database alone."""

    def __init__(
        self,
        cluster: Cluster,
        database: Database,
        writer: Writer,
        clock: Clock,
        retention: float,
        wake: Callable[[str], None],
        log_as: str = "",
    ) -> None:
        self._cluster = cluster
        self._database = database
        self._writer = writer
        self._clock = clock
        self._retention = retention
        self._wake = wake
        self._log_as = log_as
        self._active: dict[str, Eviction] = {}
        self._making: dict[str, _Making] = {}
        self._unwritten: dict[str, int] = {}
        """Eviction -> the position of the writer with which SQL has what this server was told of
        it, or its end."""
        self._over: dict[str, float] = {}
        """Those that ended lately, and when this server heard of it."""

    async def load(self) -> None:
        """Take up what SQL says runs, and let go of what doesn't. At start, and after the change
        log was lost."""
        before = set(self._active)
        found = {eviction.id: eviction for eviction in await stored.running(self._database)}
        for eviction_id in before.difference(found):
            self._let_go(eviction_id)
        for eviction in found.values():
            self._admit(eviction)

    async def create(
        self, asked: api.EvictionRequest, idempotency_key: str | None = None
    ) -> api.EvictionInfo:
        """Raises `Missing` for nodes and models that nobody knows, `Conflict` where the idempotency
        key was used for another request, `Busy`."""
        digest = hashlib.sha256(asked.model_dump_json().encode()).digest()
        if before := await self._same_request(idempotency_key, digest):
            return before
        what = self._what(asked)
        if asked.nodes is None:
            nodes = [node.id for node in self._cluster.up()]
        else:
            nodes = [self._cluster.require(node).id for node in dict.fromkeys(asked.nodes)]
        if len(nodes) > MAX_NODES:
            raise Malformed(
                f"{len(nodes)} nodes are up, and one eviction asks at most {MAX_NODES}: name them "
                "in `nodes`, in several requests"
            )
        if not nodes:
            raise Missing("no node is up that could be asked")
        self._require_room()
        keys = sum(len(eviction.what["keys"]) for eviction in self._unended())
        if keys and keys + len(what["keys"]) > _MOST_KEYS:
            raise Busy(f"{keys} keys are to be evicted: try again later")
        return await self._make(what, nodes, asked.deadline, idempotency_key, digest)

    async def shed(
        self, tenant: str, nodes: Mapping[str, Shed], deadline: float
    ) -> api.EvictionInfo:
        """Have nodes give up some of a tenant's chunks, in `deadline` seconds. Raises `Busy`."""
        self._require_room()
        return await self._make(what_to_shed(tenant, nodes), list(nodes), deadline, None, b"")

    def shedding(self, tenant: str) -> set[str]:
        """Nodes that were asked to give up some of a tenant's chunks and have not answered, or will
        be once SQL has that."""
        return {node for e in self._unended() if e.tenant == tenant for node in e.waiting}

    def sheds_of(self, tenant: str) -> list[str]:
        """Ids of the evictions that run because the tenant holds too much."""
        return [eviction.id for eviction in self._active.values() if eviction.tenant == tenant]

    def _unended(self) -> Collection[Eviction]:
        """With those that SQL may not have yet: while it is away they are no fewer."""
        making = {eviction_id: made.eviction for eviction_id, made in self._making.items()}
        return (making | self._active).values()

    def _require_room(self) -> None:
        if (count := len(self._unended())) >= _MOST_ACTIVE:
            raise Busy(f"{count} evictions are under way: try again later")

    async def _make(
        self,
        what: dict[str, Any],
        nodes: Sequence[str],
        deadline: float,
        idempotency_key: str | None,
        digest: bytes,
    ) -> api.EvictionInfo:
        self._writer.require_room()
        now = self._clock()
        info = api.EvictionInfo(
            id=f"{int(now * 1000):012x}-{secrets.token_hex(8)}",
            state=EvictionState.RUNNING,
            created=now,
            deadline=now + deadline,
            nodes=[api.NodeEviction(node=node) for node in nodes],
        )
        write = PutEviction(info, what, idempotency_key, digest, self._log_as)
        self._writer.put(write)
        eviction = Eviction(info.id, info.deadline, what, set(nodes))
        self._making[info.id] = _Making(write, self._writer.position, eviction)
        await self._writer.flushed(_COMMIT_TIMEOUT)
        self.settle()
        if write.kept != info.id:
            # Another request with this key was first, here or at another server.
            before = await self._same_request(idempotency_key, digest)
            if write.kept is None or before is None:
                raise Busy("the database did not keep this eviction: ask again; the log says why")
            return before
        return info

    async def _same_request(
        self, idempotency_key: str | None, digest: bytes
    ) -> api.EvictionInfo | None:
        if idempotency_key is None:
            return None
        wanted = EvictionRow.idempotency_key == idempotency_key
        rows = await self._database.rows(
            select(EvictionRow.id, EvictionRow.request_digest).where(wanted)
        )
        if not rows:
            return None
        if rows[0].request_digest != digest:
            raise Conflict(
                f"this Idempotency-Key was used for eviction {rows[0].id}, which asks for "
                "something else: use another key"
            )
        return await self.get(rows[0].id)

    async def get(self, eviction_id: str) -> api.EvictionInfo:
        self.expire()
        await self._ends_written([eviction_id])
        found = await read_infos(self._database, EvictionRow.id == eviction_id, 1)
        return _required(found[0] if found else None, eviction_id)

    async def kept(self, eviction_id: str) -> api.EvictionInfo | None:
        """As SQL has it, without what is about to be written. Raises `Busy`."""
        found = await read_infos(self._database, EvictionRow.id == eviction_id, 1)
        return found[0] if found else None

    async def page(self, after: str | None, limit: int) -> api.EvictionList:
        """Oldest first; fewer than `limit` where many nodes were asked."""
        self.expire()
        await self._ends_written(self._unwritten)
        shown: list[api.EvictionInfo] = []
        nodes, start = 0, after or ""
        while True:
            part = await read_infos(self._database, EvictionRow.id > start, _PER_READ)
            for info in part:
                nodes += len(info.nodes)
                if len(shown) == limit or (shown and nodes > _MOST_NODES_PER_PAGE):
                    return api.EvictionList(evictions=shown, next=shown[-1].id)
                shown.append(info)
            if len(part) < _PER_READ:
                return api.EvictionList(evictions=shown)
            start = part[-1].id

    async def _ends_written(self, ids: Iterable[str]) -> None:
        """Until SQL has the ends of those that are over, and no more of what it is to get. Raises
        `Busy` if it doesn't take them."""
        ended = [self._unwritten.get(id_, 0) for id_ in ids if id_ not in self._active]
        if (last := max(ended, default=0)) > self._writer.committed:
            await self._writer.flushed(_COMMIT_TIMEOUT, last)

    def commands(self, node: Node) -> list[api.Command]:
        """What this node should drop and was not told of lately."""
        self.expire()
        now = self._clock()
        due: list[api.Command] = []
        room = _MOST_KEYS_PER_POLL
        for eviction in self._active.values():
            if node.id not in eviction.waiting:
                continue
            when, to = eviction.offered.get(node.id, (0.0, ""))
            if to == node.incarnation and now - when < _REDELIVERY:
                continue
            room -= len(eviction.what["keys"])
            if due and room < 0:
                break
            eviction.offered[node.id] = now, node.incarnation
            due.append(eviction.command(node.id, now))
        return due

    async def result(
        self, node_id: str, eviction_id: str, result: api.EvictionResult
    ) -> api.EvictionInfo:
        """A node says what it did. Again, or too late: nothing changes. Raises `Missing`."""
        self._cluster.require_current(node_id, result.incarnation)
        self.expire()
        detail = result.detail if result.dropped is None else ""
        answer = api.NodeEviction(
            node=node_id,
            dropped=result.dropped,
            detail=detail or ("" if result.dropped is not None else "it did not say why"),
            reported=result.reported,
        )
        write = AnswerEviction(eviction_id, answer, self._clock(), self._log_as)
        self._put(eviction_id, write)
        self._answered(eviction_id, node_id)
        await self._writer.flushed(_COMMIT_TIMEOUT)
        info = _required(write.info, eviction_id)
        if all(at.node != node_id for at in info.nodes):
            raise Missing(f"eviction {eviction_id} does not ask node {node_id!r}")
        return info

    # ------------------------------------------------------------ the other servers

    async def take_up(self, entries: Iterable[WorkEntry]) -> None:
        """Of what the log says was made, what this server doesn't have."""
        made = [
            entry.id
            for entry in entries
            if isinstance(entry, EvictionMade) and entry.id not in self._active
        ]
        if made:
            for eviction in await stored.running(self._database, made):
                self._admit(eviction)

    def follow(self, entry: WorkEntry, ours: bool) -> None:
        """An entry of the log, by another server or (`ours`) this one: it took effect."""
        match entry:
            case EvictionAnswered():
                self._answered(entry.id, entry.node)
            case EvictionEnded():
                self._let_go(entry.id)

    # ------------------------------------------------------------ life

    def expire(self) -> None:
        """End what is past its deadline."""
        now = self._clock()
        for eviction in [e for e in self._active.values() if e.deadline <= now]:
            self._let_go(eviction.id)
            self._put(eviction.id, ExpireEviction(eviction.id, now, self._log_as))

    def settle(self) -> None:
        """Take up what SQL has got by now, also where who asked waits no longer."""
        for eviction_id, made in list(self._making.items()):
            if self._writer.committed >= made.position:
                del self._making[eviction_id]
                if made.write.kept == eviction_id:
                    self._admit(made.eviction)
        for eviction_id, position in list(self._unwritten.items()):
            if self._writer.committed >= position:
                del self._unwritten[eviction_id]

    def forget_old(self) -> None:
        now = self._clock()
        self._over = {e: at for e, at in self._over.items() if now - at < _OVER}
        self._writer.put(ForgetEvictions(now - self._retention))

    def _put(self, eviction_id: str, write: AnswerEviction | ExpireEviction) -> None:
        self._writer.put(write)
        self._unwritten[eviction_id] = self._writer.position

    def _admit(self, eviction: Eviction) -> None:
        """Have it in memory, unless it is there or, as this server heard meanwhile, over."""
        if eviction.id in self._active or eviction.id in self._over or not eviction.waiting:
            return
        self._active[eviction.id] = eviction
        for node in eviction.waiting:
            self._wake(node)

    def _answered(self, eviction_id: str, node: str) -> None:
        if eviction_id in self._making:
            self._making[eviction_id].eviction.waiting.discard(node)
        eviction = self._active.get(eviction_id)
        if eviction is not None:
            eviction.waiting.discard(node)
            if not eviction.waiting:
                self._let_go(eviction_id)

    def _let_go(self, eviction_id: str) -> None:
        self._over[eviction_id] = self._clock()
        self._active.pop(eviction_id, None)

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


def _required(info: api.EvictionInfo | None, eviction_id: str) -> api.EvictionInfo:
    if info is None:
        raise Missing(f"no eviction {eviction_id!r}, or it ended too long ago")
    return info
