"""Drains: nodes that are to be stopped, and have to be emptied of what only they hold first.

    state      event                                                   next
    -          POST                                                    draining
    draining   POST, for the same purpose                              unchanged
    draining   nothing is only at the node, which has settled          drained
    draining   its deadline, or for a while nothing could be done      partial
    draining   DELETE                                                  cancelled
    draining   the node leaves or starts anew: nothing was only there  drained
                                               something was           partial
    any other  anything                                                unchanged

A drain is *in force* from its POST until DELETE, another POST after its end, or until the node
leaves or starts anew. Meanwhile the node takes no new chunks into host memory, is no target of
transfers, and counts for no other node's drain; it is a source, and serves its engines. A node has
*settled* while its heartbeats say that it takes nothing new and has reported all that it holds, and
this server has read that: else nobody knows that nothing remains. It may be so no more, if a server
that had not heard of the drain had the node open for a moment: then it may not be stopped until it
has settled again, also when it is drained.

The node hears of it with its heartbeats, and where there is haste by a command to send one. A
server that starts, or another one on the same database, goes on with it (`in_force`). How it gets
on is `emptying`'s.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from kvstrata import api
from kvstrata.api import DrainState, LeftReason
from kvstrata.errors import KVStrataError
from kvstrata_server.clock import Clock
from kvstrata_server.draining.drain import Drain
from kvstrata_server.draining.emptying import Emptying
from kvstrata_server.draining.in_force import InForce
from kvstrata_server.draining.remaining import Remaining
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.problems import Conflict
from kvstrata_server.scheduling.transfers import Scheduler
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.writer import Writer

__all__ = ["Drains"]

_log = logging.getLogger(__name__)

_INTERVAL = 0.5
# Counting a node's millions of chunks takes time: at most this part of it.
_SHARE = 0.1
_NUDGE = 1.0
_REDELIVERY = 5.0
# What the server that should have ended it has, before another one does.
_LATE = 5.0
# For how long nothing comes of anything before it is given up: by then each node that is up has
# said what is free at it.
_PATIENCE = 5.0

_UNSETTLED = "it has not said that it takes no new chunks and what it holds"


class Drains:
    """Of all nodes. `run` is to be supervised."""

    def __init__(
        self,
        cluster: Cluster,
        database: Database,
        writer: Writer,
        clock: Clock,
        retention: float,
        transfers: Scheduler,
    ) -> None:
        self._cluster = cluster
        self._writer = writer
        self._clock = clock
        self._retention = retention
        self._transfers = transfers
        self._emptying = Emptying(cluster, transfers, clock)
        self._wake = asyncio.Event()
        self._in_force = InForce(cluster, database, writer, clock, self._wake.set)
        self._nudged: dict[str, float] = {}
        """Nodes that should send a heartbeat, and when they were last told."""
        self._strange: dict[str, float] = {}
        """Drains whose node is not as it was here, and since when."""
        self._advancing = asyncio.Lock()

    async def load(self) -> None:
        """Take up what is in force."""
        await self._in_force.load()

    # ------------------------------------------------------------ requests

    async def create(self, node_id: str, asked: api.DrainRequest) -> api.DrainInfo:
        """Raises `Missing` for unknown nodes, `Conflict` where the node is drained for another
        purpose or is to be its own target, `Busy`."""
        await self._in_force.refresh(at_once=True)
        node = self._cluster.require(node_id)
        for target in asked.targets or ():
            if self._cluster.require(target) is node:
                raise Conflict(f"node {node_id!r} can't take what it is to be rid of")
        before = self._in_force.get(node_id)
        if before is not None and not before.state.ended and before.incarnation == node.incarnation:
            if before.purpose != asked.for_ or before.targets != asked.targets:
                raise Conflict(
                    f"node {node_id!r} is drained for its {before.purpose} by {before.id}: cancel "
                    f"that first (DELETE /v1/nodes/{node_id}/drain)"
                )
            return await self._info(before)
        self._writer.require_room()
        if before is not None:
            self._supersede(before, node)
        now = self._clock()
        drain = Drain(
            id=f"{int(now * 1000):012x}-{secrets.token_hex(8)}",
            node=node_id,
            incarnation=node.incarnation,
            purpose=asked.for_,
            created=now,
            deadline=now + asked.deadline,
            targets=asked.targets,
        )
        self._in_force.adopt(drain)
        self._in_force.write(
            drain
        )  # before anything is waited for: what isn't written may be dropped
        await self._count(drain)
        self._in_force.write(drain)
        self._nudge(node_id)
        self._wake.set()
        await self._in_force.written()
        return await self._info(drain)

    async def get(self, node_id: str) -> api.DrainInfo:
        """The latest of a node. Raises `Missing` if there is none."""
        return await self._info(await self._find(node_id))

    async def cancel(self, node_id: str) -> api.DrainInfo:
        """The node takes new chunks again. One that isn't in force stays as it is."""
        async with self._advancing:
            drain = await self._find(node_id)
            if drain.in_force:
                if not drain.state.ended:
                    await self._emptying.cancel(drain)
                    await self._count(drain)
                    self._ended(drain, DrainState.CANCELLED, "cancelled by request")
                drain.in_force = False
                self._in_force.write(drain)
                self._in_force.drop(drain)
                self._nudge(node_id)
        await self._in_force.written()
        return drain.info()

    async def _find(self, node_id: str) -> Drain:
        await self._in_force.refresh()
        return self._in_force.get(node_id) or await self._in_force.latest(node_id)

    async def _info(self, drain: Drain) -> api.DrainInfo:
        """While it goes on it is counted all the time, and not once more for all who ask."""
        node = self._in_force.node_of(drain)
        if node is None or not (drain.in_force and drain.state.ended):
            return drain.info(is_known=node is not None)
        self._see_gaps(drain, node)
        is_known = drain.state is DrainState.DRAINED and await self._in_force.knows_of_others(drain)
        drain = self._in_force.get(drain.node) or drain  # as it was just read
        found = await Remaining(self._cluster, node, drain.purpose).find()
        now = api.Amount(chunks=found.chunks, bytes=found.bytes)
        return drain.info(now, _advice(drain, now, is_known), is_known=is_known)

    # ------------------------------------------------------------ the node's side

    def heard(self, node_id: str, beat: api.HeartbeatRequest) -> bool:
        """A heartbeat has come. Returns whether the node is to take no new chunks."""
        self._nudged.pop(node_id, None)
        drain = self._in_force.get(node_id)
        if drain is None or drain.incarnation != beat.incarnation:
            # Another server may have said that a node may be stopped that has settled.
            return beat.settled and not self._in_force.is_current
        node = self._cluster.nodes[node_id]
        has_all = beat.next_seq is not None and beat.next_seq <= node.next_seq
        settled = beat.settled and has_all and not node.snapshot_wanted
        if settled is not drain.settled:
            drain.settled = settled
            self._in_force.write(drain)
            self._wake.set()
        return True

    def _see_gaps(self, drain: Drain, node: Node) -> None:
        """Reports of the node were lost since it settled: what it holds is not known."""
        if drain.settled and node.snapshot_wanted and self._in_force.is_ours(node):
            drain.settled = False
            self._in_force.write(drain)

    def commands(self, node: Node) -> list[api.Command]:
        """What this node should do and was not told of lately."""
        now = self._clock()
        due: list[api.Command] = []
        if now - self._nudged.get(node.id, now) >= _NUDGE:
            self._nudged[node.id] = now
            due.append(api.Command(kind="beat", transfer="beat"))
        drain = self._in_force.get(node.id)
        order = None if drain is None or drain.incarnation != node.incarnation else drain.order
        if order is not None:
            when, to = order.offered or (0.0, "")
            if to != node.incarnation or now - when >= _REDELIVERY:
                order.offered = now, node.incarnation
                due.append(self._emptying.command(order))
        return due

    def result(self, node_id: str, order: str, result: api.StoreResult) -> api.OrderReply:
        """A node says what it stored. Again, or too late: nothing changes."""
        self._cluster.require_current(node_id, result.incarnation)
        drain = self._in_force.get(node_id)
        if drain is None or drain.order is None or drain.order.id != order:
            return api.OrderReply(wanted=False)
        self._emptying.ordered(drain, result)
        self._wake.set()
        return api.OrderReply(wanted=True)

    def _nudge(self, node_id: str) -> None:
        self._nudged[node_id] = self._clock() - _NUDGE
        self._transfers.wake(node_id)

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Get on with all of them, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            began = loop.time()
            await self.advance()
            pause = max(_INTERVAL, (loop.time() - began) / _SHARE)
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def advance(self) -> None:
        """One step of each."""
        async with self._advancing:
            await self._in_force.refresh()
            for drain in self._in_force:
                try:
                    await self._advance(drain)
                except KVStrataError as e:
                    drain.trouble = str(e)
                    _log.warning("drain %s of node %s: %s", drain.id, drain.node, e)

    async def _advance(self, drain: Drain) -> None:
        node = self._in_force.node_of(drain)
        if node is None:
            self._lapse(drain)
            return
        self._strange.pop(drain.id, None)
        node.drain = drain.state
        self._see_gaps(drain, node)
        if drain.state.ended:
            return
        now = self._clock()
        if not self._in_force.is_ours(node):
            if now < drain.deadline + _LATE:
                return
        elif now < drain.deadline:
            await self._get_on(drain, node)
            self._in_force.write(drain)
            return
        await self._emptying.cancel(drain)
        await self._count(drain)
        self._end(drain, LeftReason.LATE, "its deadline passed")

    async def _get_on(self, drain: Drain, node: Node) -> None:
        now = self._clock()
        await self._emptying.look(drain)
        if self._cluster.state(node) is not api.NodeState.UP:
            drain.active = now  # it may come back
            return
        if not drain.settled and now - self._nudged.get(node.id, 0.0) >= _NUDGE:
            self._nudge(node.id)
        await self._emptying.step(drain, node)
        if drain.chunks == 0 and drain.settled and await self._in_force.knows_of_others(drain):
            await self._count(drain)
            if drain.chunks == 0 and drain.settled and self._in_force.goes_on(drain):
                self._end(drain, LeftReason.WAITING, "")
        if drain.chunks == 0 or not self._in_force.goes_on(drain):
            return
        under_way = drain.moves or drain.order is not None
        if not under_way and now - drain.active > max(_PATIENCE, self._cluster.ttl):
            why = self._emptying.hindrance(drain, node)
            self._end(drain, why, "nothing more can be done at present")

    async def _count(self, drain: Drain) -> None:
        node = self._in_force.node_of(drain)
        if node is not None:
            await self._emptying.count(drain, node)

    def _lapse(self, drain: Drain) -> None:
        """Its node is not what it was. A server that the node doesn't talk to may only be late
        to hear of the one that is drained."""
        node = self._cluster.nodes.get(drain.node)
        since = self._strange.setdefault(drain.id, self._clock())
        if not self._in_force.hears_all(node) and self._clock() - since < _LATE:
            return
        self._leave(drain, node)

    def _supersede(self, drain: Drain, node: Node) -> None:
        """Another one is about to begin: this one has ended, or is of an earlier incarnation."""
        if drain.incarnation != node.incarnation:
            self._leave(drain, node)
        else:
            drain.in_force = False
            self._in_force.write(drain)

    def _leave(self, drain: Drain, node: Node | None) -> None:
        """What was to be drained is not there any more."""
        self._strange.pop(drain.id, None)
        what = "left" if node is None or node.gone else "started anew"
        if not drain.state.ended:
            drain.moves.clear()
            drain.order = None
            self._end(drain, LeftReason.LATE, f"the node {what} before it was drained")
        drain.in_force = False
        self._in_force.write(drain)
        self._in_force.drop(drain)

    def _end(self, drain: Drain, waiting_was: LeftReason, why: str) -> None:
        """Drained, if there is nothing left; else with what was the reason of what waited."""
        if drain.chunks == 0 and drain.settled:
            self._ended(drain, DrainState.DRAINED, "")
        else:
            if not drain.settled:
                why += f", and {_UNSETTLED}"
            drain.count_left(drain.tried(drain.attempts), waiting_was)
            self._ended(drain, DrainState.PARTIAL, _told(drain, why))
        self._in_force.write(drain)

    def _ended(self, drain: Drain, state: DrainState, detail: str) -> None:
        drain.state, drain.ended, drain.detail = state, self._clock(), detail
        drain.attempts.clear()
        node = self._in_force.node_of(drain)
        if node is not None:
            node.drain = state

    def forget_old(self) -> None:
        self._in_force.forget_old(self._clock() - self._retention)


def _advice(drain: Drain, remaining: api.Amount, is_known: bool) -> str:
    """What to do where a node that is drained may not be stopped."""
    if drain.state is not DrainState.DRAINED:
        return ""
    if remaining.chunks:
        return "What was safe elsewhere is so no more: drain again."
    if not drain.settled:
        return f"Since then {_UNSETTLED}: wait for its next heartbeats."
    if not is_known:
        return "Whether other nodes are drained can't be read at the moment: ask again."
    return ""


def _told(drain: Drain, why: str) -> str:
    told = f"{why}; {drain.chunks} chunks ({drain.bytes} bytes) are only at this node"
    return f"{told}. Last trouble: {drain.trouble}" if drain.trouble else told
