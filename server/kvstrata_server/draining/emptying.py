"""How a drain gets on: what only the node holds is written back and moved, a part at a time.

A chunk is first offered to the stores that keep it safe, those first that other nodes have too;
what none of them takes is moved to other nodes' host memory, as far as that is free. Chunks in host
memory come before those in stores of the node's own, and all of them in the order in which they
were reported, which has the beginnings of chains before what extends them.

That a chunk is safe is never concluded from an answer, but seen in the index, once whoever took it
has reported it. So nothing here need be remembered over the end of a server: what isn't safe yet
is found again.

What was tried is remembered until it is safe or gone, of a bounded number of chunks. Those are seen
to before others, and while they are so many nothing else is begun: the way is free again when some
are safe. Where so many can't be made safe at all, the rest would fare no better.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from kvstrata import api
from kvstrata.api import LeftReason, Outcome
from kvstrata.errors import KVStrataError, Missing
from kvstrata.keys import Key
from kvstrata_server.clock import Clock
from kvstrata_server.draining.drain import Drain, Move, Order
from kvstrata_server.draining.remaining import Remaining
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.scheduling.shown import Shown
from kvstrata_server.scheduling.transfers import Scheduler

__all__ = ["Emptying"]

_LOOKED_AT = 4096
# About 210 bytes each.
_MOST_TRIED = 65_536
# Looked up between two turns of others.
_PRUNED = 1024
_PART_KEYS = 1024
_PART_BYTES = 256 << 20
_MOST_MOVES = 4
_PRIORITY = 1
_MOVE_SECONDS = 120.0
_ORDER_SECONDS = 60.0
# For an answer that is on its way when the order ends.
_GRACE = 10.0
# Who took a chunk reports it within that.
_REPORTED = 5.0
# A node's free memory is as of its last heartbeat.
_HEARD = 5.0
_AGAIN = 1.0
# What is free at a node, but for this part, which its engines need at any moment.
_SPARED = 16

_HERE = (Outcome.STORED, Outcome.PRESENT)


class Emptying:
    def __init__(self, cluster: Cluster, transfers: Scheduler, clock: Clock) -> None:
        self._cluster = cluster
        self._transfers = transfers
        self._clock = clock
        self._full: dict[str, float] = {}
        """Nodes that had no room, and until when that is believed."""
        self._promised: list[tuple[float, str, int]] = []
        """What was moved lately and may not be in heartbeats yet: until when, node, bytes."""

    async def count(self, drain: Drain, node: Node) -> None:
        """What remains, now, and why."""
        remaining = Remaining(self._cluster, node, drain.purpose)
        found = await remaining.find()
        self._counted(drain, found.chunks, found.bytes)
        drain.count_left(await self._prune(drain, remaining))

    async def step(self, drain: Drain, node: Node) -> None:
        """Count what remains, and begin what can be begun."""
        remaining = Remaining(self._cluster, node, drain.purpose)
        tried = await self._prune(drain, remaining)
        busy, attempts = drain.busy(), drain.attempts
        room = _MOST_TRIED - len(attempts) - sum(key not in attempts for key in busy)
        found = await remaining.find(
            min(_LOOKED_AT, max(0, room)), lambda key: key not in busy and key not in attempts
        )
        self._counted(drain, found.chunks, found.bytes)
        drain.count_left(tried)
        stores = self._stores(node, remaining, drain)
        to_store: list[Key] = []
        to_move: list[Key] = []
        again = islice(drain.to_try_again(self._clock(), busy), _LOOKED_AT)
        for key in [*again, *found.some]:
            attempt = attempts.get(key)
            may_store = stores and (attempt is None or attempt.may_store)
            (to_store if may_store else to_move).append(key)
        if to_store and drain.order is None:
            self._order(drain, to_store, stores)
        if to_move and node.peer_address:
            await self._move(drain, node, to_move, remaining)

    def hindrance(self, drain: Drain, node: Node) -> LeftReason:
        """Why nothing is begun for what was not tried: so much was in vain, and then for what most
        of that was; or no store and no node at all could take it; or there is no room."""
        tried = drain.tried(drain.attempts)
        if len(drain.attempts) >= _MOST_TRIED and tried:
            return tried.most_common(1)[0][0]
        remaining = Remaining(self._cluster, node, drain.purpose)
        nodes = node.peer_address and self._allowed(drain, remaining)
        ways = self._stores(node, remaining, drain) or nodes
        return LeftReason.NO_ROOM if ways else LeftReason.NO_WAY

    async def cancel(self, drain: Drain) -> None:
        """Nothing of it is wanted any more. What can't be cancelled ends by its deadline."""
        drain.order = None
        for id_ in list(drain.moves):
            try:
                await self._transfers.cancel(id_)
            except KVStrataError as e:
                drain.trouble = str(e)
        await self.look(drain)

    def _counted(self, drain: Drain, chunks: int, nbytes: int) -> None:
        if chunks < drain.chunks:
            drain.active = self._clock()
        drain.chunks, drain.bytes = chunks, nbytes

    async def _prune(self, drain: Drain, remaining: Remaining) -> Counter[LeftReason]:
        """Forget what was tried for chunks that are safe or gone now; how many others were, and
        what came of it."""
        attempts = list(drain.attempts)
        tried: Counter[LeftReason] = Counter()
        for start in range(0, len(attempts), _PRUNED):
            part = attempts[start : start + _PRUNED]
            safe = remaining.safe(part)
            drain.forget(key for key, is_safe in zip(part, safe, strict=True) if is_safe)
            tried += drain.tried(part)
            await asyncio.sleep(0)
        return tried

    # ------------------------------------------------------------ stores

    def _stores(self, node: Node, remaining: Remaining, drain: Drain) -> list[str]:
        """Those at the node that keep a chunk safe, best first."""
        usable = [store for store in node.stores if store in remaining.own]
        shared = [store for store in usable if store in remaining.shared]
        own = [store for store in usable if store not in remaining.shared]
        return shared + own if drain.purpose == "restart" else shared

    def _order(self, drain: Drain, keys: Sequence[Key], stores: Sequence[str]) -> None:
        part, _ = self._part(keys)
        seconds = min(_ORDER_SECONDS, max(_AGAIN, drain.deadline - self._clock()))
        drain.order = Order(secrets.token_hex(8), part, stores, self._clock() + seconds)
        self._transfers.wake(drain.node)

    def command(self, order: Order) -> api.Command:
        return api.Command(
            kind="store",
            transfer=order.id,
            keys=[key.hex() for key in order.keys],
            stores=list(order.stores),
            deadline_in=max(0.0, order.until - self._clock()),
        )

    def ordered(self, drain: Drain, result: api.StoreResult) -> None:
        """The node has said what became of the keys of the order under way."""
        order, drain.order = drain.order, None
        if order is None:
            return
        now = self._clock()
        drain.trouble = result.detail or drain.trouble
        for key in order.keys:
            attempt, text = drain.attempt(key), key.hex()
            outcome = result.outcomes.get(text)
            attempt.again = now + (_REPORTED if outcome in _HERE else _AGAIN)
            attempt.stores += 1
            if outcome is Outcome.STORED:
                drain.stored[result.stores.get(text, order.stores[0])] += 1
            elif outcome is None or outcome is Outcome.NO_ROOM:
                why = LeftReason.FAILED if outcome is None else LeftReason.NO_ROOM
                attempt.stored_nowhere(why)
            elif outcome is Outcome.MISSING:  # gone, as its report will say
                attempt.again = now + _REPORTED
            elif outcome not in _HERE:
                attempt.why = LeftReason.FAILED
        drain.active = now

    # ------------------------------------------------------------ other nodes

    async def look(self, drain: Drain) -> None:
        """Take note of what has ended."""
        now = self._clock()
        if drain.order is not None and now > drain.order.until + _GRACE:
            for key in drain.order.keys:
                drain.attempt(key).stored_nowhere(LeftReason.FAILED)
            drain.order, drain.active = None, now
            drain.trouble = "the node did not say what became of chunks that it was to store"
        for id_, move in list(drain.moves.items()):
            try:
                if (await self._transfers.summary(id_)).state.ended or move.keys is None:
                    self._moved(drain, id_, move, await self._transfers.get(id_))
            except Missing:
                del drain.moves[id_]
            except KVStrataError as e:  # the database is away: it is asked again
                drain.trouble = str(e)

    def _moved(self, drain: Drain, id_: str, move: Move, now_is: Shown) -> None:
        outcomes = dict(zip(now_is.keys, now_is.outcomes, strict=True))
        if not now_is.state.ended:
            move.keys = list(outcomes)
            return
        del drain.moves[id_]
        now = self._clock()
        self._promised.append((now + _HEARD, move.target, now_is.summary.bytes))
        stored = sum(outcome is Outcome.STORED for outcome in outcomes.values())
        if stored:
            drain.moved[move.target] += stored
        drain.moved_bytes += now_is.summary.bytes
        for key, outcome in outcomes.items():
            attempt = drain.attempt(key)
            attempt.again = now + (_REPORTED if outcome in _HERE else _AGAIN)
            if outcome is Outcome.NO_ROOM:  # that says nothing of other nodes
                attempt.why = LeftReason.NO_ROOM
                self._full[move.target] = now + _HEARD
                continue
            drain.active = now
            attempt.moves += 1
            if outcome is Outcome.MISSING:
                attempt.again = now + _REPORTED
            elif outcome in _HERE:
                attempt.why = LeftReason.WAITING
            else:
                attempt.why = LeftReason.FAILED
                drain.trouble = now_is.summary.detail or drain.trouble

    async def _move(
        self, drain: Drain, node: Node, keys: Sequence[Key], remaining: Remaining
    ) -> None:
        now = self._clock()
        targets = self._targets(drain, remaining)
        left = self._fitting(drain, keys, targets[0][0]) if targets else []
        for free, target in targets:
            if len(drain.moves) >= _MOST_MOVES:
                return
            part, size = self._turn(left, free)
            if not part:
                return  # the others have less
            try:
                made = await self._transfers.create(
                    api.TransferRequest(
                        target=target.id,
                        source=node.id,
                        keys=[key.hex() for key in part],
                        priority=_PRIORITY,
                        deadline=min(_MOVE_SECONDS, max(_AGAIN, drain.deadline - now)),
                        hold=0.0,
                        byte_budget=free,
                        free_only=True,
                    ),
                    None,
                )
            except KVStrataError as e:  # busy, or a quota: later, and elsewhere
                drain.trouble = str(e)
                self._full[target.id] = now + _HEARD
                continue
            drain.moves[made.id] = Move(target.id, part, size)
            gone = set(part)
            left = [key for key in left if key not in gone]

    def _fitting(self, drain: Drain, keys: Sequence[Key], most: int) -> list[Key]:
        """Without those that are too large for all, which is said of them: they are looked at again
        when that may be otherwise."""
        fitting = []
        for key in keys:
            if self._cluster.namespaces.chunk_bytes(key) <= most:
                fitting.append(key)
                continue
            attempt = drain.attempt(key)
            attempt.why, attempt.again = LeftReason.NO_ROOM, self._clock() + _HEARD
            drain.trouble = f"chunks are larger than what is free at any one node ({most} bytes)"
        return fitting

    def _turn(self, keys: Sequence[Key], free: int) -> tuple[list[Key], int]:
        """What may be moved at once into what is free, and its bytes: of the first tenant that has
        any, since a transfer takes the turn of one."""
        of_tenant: dict[str, list[Key]] = {}
        for key in keys:
            of_tenant.setdefault(self._cluster.namespaces.tenant(key), []).append(key)
        parts = (self._part(same, free) for same in of_tenant.values())
        return next((part for part in parts if part[0]), ([], 0))

    def _allowed(self, drain: Drain, remaining: Remaining) -> list[Node]:
        return [n for n in remaining.others if drain.targets is None or n.id in drain.targets]

    def _targets(self, drain: Drain, remaining: Remaining) -> list[tuple[int, Node]]:
        """Nodes that have room, and how much, those first that have most."""
        now = self._clock()
        self._promised = [each for each in self._promised if each[0] > now]
        taken: dict[str, int] = {}
        for target, nbytes in (
            *((move.target, move.bytes) for move in drain.moves.values()),
            *((target, nbytes) for _, target, nbytes in self._promised),
        ):
            taken[target] = taken.get(target, 0) + nbytes
        found = []
        for node in self._allowed(drain, remaining):
            if node.host is None or not node.healthy or self._full.get(node.id, now) > now:
                continue
            spared = node.host.capacity_bytes // _SPARED
            free = node.host.capacity_bytes - node.host.used_bytes
            free -= spared + taken.get(node.id, 0)
            if free > 0:
                found.append((free, node))
        return sorted(found, key=lambda each: (-each[0], each[1].id))

    def _part(self, keys: Sequence[Key], free: int | None = None) -> tuple[list[Key], int]:
        """As many as are not too much at once, from the first on, of those that fit into what is
        left of what is free; and their bytes."""
        part: list[Key] = []
        size = 0
        for key in keys:
            nbytes = max(1, self._cluster.namespaces.chunk_bytes(key))
            if free is not None and size + nbytes > free:
                continue
            if len(part) == _PART_KEYS or (part and size + nbytes > _PART_BYTES):
                break
            part.append(key)
            size += nbytes
        return part, size
