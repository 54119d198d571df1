"""Transfers: scheduled movements of chunks to a node, from request to outcome.

The target executes. It polls for commands, pulls from the sources named, and posts progress.

    state             event                                        next
    -                 POST                                         queued
    -                 POST, dry run                                planned: answered, not kept
    queued            first progress from the target               running
    running           the target registers a new incarnation       running, offered again
    running           this server starts again                     running, offered again
    queued, running   final progress: every key stored or present  done
                                      some keys                    partial
                                      no key                       failed
    queued, running   DELETE                                       cancelled, target told
    queued, running   its deadline                                 expired, target told
    any other         anything                                     unchanged

Keys without an outcome end as `failed` after final progress, else as `cancelled`. A target that
falls silent says nothing, so the deadline is what ends every transfer. Whose turn it is to be
handed out, and how many at once, is `turns`'.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.errors import Busy, Malformed, Missing, PeerRefused
from kvstrata.keys import Key
from kvstrata_server import history
from kvstrata_server.clock import Clock
from kvstrata_server.cluster import Cluster, Node, keys_of
from kvstrata_server.database import Database
from kvstrata_server.metrics import Metrics
from kvstrata_server.planning import ANY, OWN, Plan, hints, plan
from kvstrata_server.problems import Conflict
from kvstrata_server.transfer import Transfer
from kvstrata_server.turns import Turn, Turns
from kvstrata_server.writer import Writer
from kvstrata_server.writes import ForgetTransfers

__all__ = ["Scheduler"]

MAX_ACTIVE_KEYS = 4_000_000
_COMMIT_TIMEOUT = 10.0
# A command whose answer got lost is offered again after this; one that was taken is not.
_REDELIVERY = 5.0
_CANCEL_TTL = 300.0
# Planning takes about a millisecond for a thousand keys, and most that wait will wait on.
_PLANS_PER_POLL = 32


@dataclass(slots=True)
class _Cancel:
    """A target that has to be told, until it answers or this has no point any more."""

    until: float
    offered: float | None = None


@dataclass(slots=True)
class _Mailbox:
    """What waits for one node, and what wakes its long poll."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    cancels: dict[str, _Cancel] = field(default_factory=dict)


async def _listening() -> bool:
    return False


class Scheduler:
    """Transfers that have not ended, in memory and in SQL; ended ones are read from SQL."""

    def __init__(
        self,
        cluster: Cluster,
        database: Database,
        writer: Writer,
        metrics: Metrics,
        clock: Clock,
        retention: float,
        turns: Turns,
        orders: Callable[[Node], list[api.Command]] = lambda node: [],
    ) -> None:
        """`orders(node)` are commands of other kinds that wait for a node."""
        self._cluster = cluster
        self._database = database
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._retention = retention
        self._turns = turns
        self._orders = orders
        self._active: dict[str, Transfer] = {}
        self._active_keys = 0
        self._ended: dict[str, tuple[Transfer, int]] = {}
        self._by_idempotency: dict[str, Transfer] = {}
        self._released: dict[str, float] = {}
        self._mailboxes: dict[str, _Mailbox] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._creating = asyncio.Lock()
        self._closing = False

    @property
    def active(self) -> int:
        return len(self._active)

    async def load(self) -> None:
        """Take up what had not ended when the last process did."""
        for transfer in await history.unended(self._database):
            self._admit(transfer)

    # ------------------------------------------------------------ requests

    async def create(
        self, asked: api.TransferRequest, idempotency_key: str | None
    ) -> api.TransferInfo:
        """Raises `Missing` for an unknown target or source, `Malformed` for a source that serves
        no peers, `Conflict` where the idempotency key was used for another request, `Busy`."""
        digest = hashlib.sha256(asked.model_dump_json().encode()).digest()
        async with self._creating:
            before = await self._same_request(idempotency_key, digest)
            transfer = before or self._planned(asked, idempotency_key, digest)
            if before is None:
                if asked.dry_run:
                    return transfer.info()
                if self._active_keys + len(transfer.keys) > MAX_ACTIVE_KEYS:
                    raise Busy(f"{self._active_keys} keys are being transferred: try again later")
                self._writer.require_room()
                self._writer.put(transfer.row())
                self._admit(transfer)
                self._mailbox(transfer.target).wake.set()
        # Accepted means that it outlives this process, for who asks again no less.
        await self._writer.flushed(_COMMIT_TIMEOUT)
        await self._kept(transfer)
        return transfer.info()

    async def _same_request(self, idempotency_key: str | None, digest: bytes) -> Transfer | None:
        if idempotency_key is None:
            return None
        found = self._by_idempotency.get(idempotency_key)
        if found is None:
            try:
                async with asyncio.timeout(_COMMIT_TIMEOUT):
                    found = await history.by_idempotency_key(self._database, idempotency_key)
            except TimeoutError:  # others wait for their turn to create
                raise Busy("the database does not answer: see /healthz") from None
        if found is not None and found.request_digest != digest:
            raise Conflict(
                f"this Idempotency-Key was used for transfer {found.id}, which asks for something "
                "else: use another key"
            )
        return found

    def _planned(
        self, asked: api.TransferRequest, idempotency_key: str | None, digest: bytes
    ) -> Transfer:
        target = self._cluster.require(asked.target)
        if asked.source not in (ANY, OWN) and not self._cluster.require(asked.source).peer_address:
            raise Malformed(
                f"node {asked.source!r} serves no peers: set `peers.listen` there, or ask for "
                f"source {ANY!r}"
            )
        if asked.source == OWN and asked.free_only:
            raise Malformed(f"free_only is for transfers from other nodes, not from {OWN!r}")
        if asked.source == target.id:
            raise Malformed(f"node {asked.source!r} can't be source and target of one transfer")
        now = self._clock()
        keys = keys_of(list(dict.fromkeys(asked.keys)))
        planned = plan(self._cluster, keys, target, asked.source, asked.byte_budget)
        transfer = Transfer(
            id=f"{int(now * 1000):012x}-{secrets.token_hex(8)}",
            state=TransferState.QUEUED,
            source=asked.source,
            target=target.id,
            priority=asked.priority,
            created=now,
            deadline=now + asked.deadline,
            hold=asked.hold,
            byte_budget=asked.byte_budget,
            keys=keys,
            outcomes=[Outcome.PENDING] * len(keys),
            sources=[None] * len(keys),
            idempotency_key=idempotency_key,
            request_digest=digest,
            free_only=asked.free_only,
        )
        transfer.hints = hints(transfer.id, keys, next(iter(planned.sources), None))
        if asked.dry_run:
            transfer.state = TransferState.PLANNED
            transfer.outcomes = [e.outcome for e in planned.expected]
            transfer.sources = [e.source for e in planned.expected]
            transfer.bytes = planned.bytes
        return transfer

    async def get(self, transfer_id: str) -> api.TransferInfo:
        transfer = await self._find(transfer_id)
        await self._kept(transfer)
        return transfer.info()

    async def held(self, transfer_id: str) -> tuple[api.TransferInfo, float]:
        """A transfer, and until when its target holds what it brought (0: not at all)."""
        transfer = await self._find(transfer_id)
        released = transfer_id in self._released
        return transfer.info(), 0.0 if released else transfer.holds_until

    async def page(self, after: str | None, limit: int) -> api.TransferList:
        self.expire()
        page = await history.page(self._database, after, limit)
        return api.TransferList(
            transfers=[
                live.summary() if (live := self._active.get(row.id)) else row
                for row in page.transfers
            ],
            next=page.next,
        )

    async def cancel(self, transfer_id: str) -> api.TransferInfo:
        """One that has ended stays as it is, and its target is told to hold its chunks no more.

        That is not kept in SQL: a server that ends now leaves the hold to its time.
        """
        transfer = await self._find(transfer_id)
        if not transfer.state.ended:
            self._require_ours(transfer)
            self._end(transfer, TransferState.CANCELLED, "cancelled by request")
            await self._writer.flushed(_COMMIT_TIMEOUT)
        elif transfer.holds_until > self._clock():
            mailbox = self._mailbox(transfer.target)
            mailbox.cancels[transfer.id] = _Cancel(until=transfer.holds_until)
            self._released[transfer.id] = transfer.holds_until
            mailbox.wake.set()
        await self._kept(transfer)
        return transfer.info()

    async def _kept(self, transfer: Transfer) -> None:
        """An end is told once SQL has it: a server that died before would have told of another."""
        _, position = self._ended.get(transfer.id, (transfer, 0))
        if self._writer.committed < position:
            await self._writer.flushed(_COMMIT_TIMEOUT)

    def _live(self, transfer_id: str) -> Transfer | None:
        if transfer_id in self._active:
            return self._active[transfer_id]
        ended = self._ended.get(transfer_id)
        return ended[0] if ended else None

    async def _find(self, transfer_id: str) -> Transfer:
        self.expire()
        found = self._live(transfer_id) or await history.by_id(self._database, transfer_id)
        if found is None:
            raise Missing(f"no transfer {transfer_id!r}, or it ended too long ago")
        return found

    def _require_ours(self, transfer: Transfer) -> None:
        """Raises `Busy`: with luck the next try reaches the server that has it."""
        if transfer.id not in self._active:
            raise Busy(
                f"another server of this database schedules transfer {transfer.id}: ask that one"
            )

    # ------------------------------------------------------------ the target's side

    async def commands(
        self,
        node_id: str,
        incarnation: str,
        wait: float = 0.0,
        hung_up: Callable[[], Awaitable[bool]] = _listening,
    ) -> api.CommandBatch:
        """What this node should do; waits until there is something, `wait` seconds at most.

        Nothing is handed to a caller that hung up while it waited.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + wait
        while True:
            node = self._cluster.require_current(node_id, incarnation)
            self.expire()
            mailbox = self._mailbox(node_id)
            if await hung_up():
                return api.CommandBatch(commands=[])
            mailbox.wake.clear()
            commands = self._orders(node) + self._due(node, mailbox)
            left = until - loop.time()
            if commands or left <= 0 or self._closing:
                return api.CommandBatch(commands=commands)
            try:
                async with asyncio.timeout(min(left, _REDELIVERY)):
                    await mailbox.wake.wait()
            except TimeoutError:
                continue

    def _due(self, node: Node, mailbox: _Mailbox) -> list[api.Command]:
        now = self._clock()
        commands = []
        for transfer_id, cancel in list(mailbox.cancels.items()):
            if now > cancel.until:
                del mailbox.cancels[transfer_id]
            elif cancel.offered is None or now - cancel.offered >= _REDELIVERY:
                cancel.offered = now
                commands.append(api.Command(kind="cancel", transfer=transfer_id))
        room, plans = api.MAX_KEYS, _PLANS_PER_POLL
        due = {
            transfer.id: transfer
            for transfer in mailbox.transfers.values()
            if transfer.is_due(node.incarnation, now, _REDELIVERY)
        }
        # Those whose offer was lost have their places, and would keep them idle behind others.
        again = [self._turn(transfer) for transfer in due.values() if transfer.offered is not None]
        fresh = [self._turn(transfer) for transfer in due.values() if transfer.offered is None]
        for turn in (*again, *self._turns.in_order(fresh)):
            transfer = due[turn.id]
            known = transfer.offered is not None
            if room <= 0 or plans <= 0 or not (known or self._turns.has_room(node.id)):
                break
            plans -= 1
            planned = plan(
                self._cluster, transfer.keys, node, transfer.source, transfer.byte_budget
            )
            best = planned.sources[0].id if planned.sources else ""
            if self._turns.start(turn, best, node.id):
                transfer.offer(node.incarnation, now)
                room -= len(transfer.keys)
                commands.append(self._pull_command(transfer, planned, now))
        return commands

    def _turn(self, transfer: Transfer) -> Turn:
        namespaces = self._cluster.namespaces
        return Turn(
            transfer.id,
            namespaces.tenant(transfer.keys[0]),
            transfer.priority,
            (transfer.created, transfer.id),
            max(1, len(transfer.keys) * namespaces.chunk_bytes(transfer.keys[0])),
        )

    def _pull_command(self, transfer: Transfer, planned: Plan, now: float) -> api.Command:
        return api.Command(
            kind="pull",
            transfer=transfer.id,
            namespaces=self._cluster.namespaces.documents(transfer.keys),
            keys=[key.hex() for key in transfer.keys],
            sources=[
                api.SourceRef(node=source.id, address=source.peer_address)
                for source in planned.sources
                if source.peer_address
            ],
            deadline_in=max(0.0, transfer.deadline - now),
            hold=transfer.hold,
            byte_budget=transfer.byte_budget,
            free_only=transfer.free_only,
        )

    async def progress(self, node_id: str, progress: api.Progress) -> api.ProgressReply:
        self._cluster.require_current(node_id, progress.incarnation)
        transfer = await self._find(progress.transfer)
        if transfer.target != node_id:
            raise PeerRefused(f"transfer {transfer.id} is for {transfer.target!r}, not {node_id!r}")
        if transfer.state.ended:
            self._mailbox(node_id).cancels.pop(transfer.id, None)
            await self._kept(transfer)
            return api.ProgressReply(state=transfer.state)
        self._require_ours(transfer)
        transfer.taken_by = progress.incarnation
        changed = transfer.record(
            ((Key(bytes.fromhex(key)), o) for key, o in progress.outcomes.items()),
            {Key(bytes.fromhex(key)): source for key, source in progress.sources.items()},
        )
        self._metrics.moved_bytes.inc(max(0, progress.bytes - transfer.bytes))
        transfer.bytes = max(transfer.bytes, progress.bytes)
        transfer.detail = progress.detail or transfer.detail
        if progress.final:
            self._end(transfer, transfer.final_state(), transfer.detail, changed)
            await self._writer.flushed(_COMMIT_TIMEOUT)
        else:
            transfer.state = TransferState.RUNNING
            self._writer.put(transfer.update(changed))
        return api.ProgressReply(state=transfer.state)

    # ------------------------------------------------------------ life

    def wake(self, node_id: str) -> None:
        """There is something for this node to do."""
        self._mailbox(node_id).wake.set()

    def expire(self) -> None:
        """End what is past its deadline."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, transfer_id = heapq.heappop(self._deadlines)
            transfer = self._active.get(transfer_id)
            if transfer is not None:
                self._end(transfer, TransferState.EXPIRED, "its deadline passed")

    def sweep(self) -> None:
        """Let go of ended transfers that SQL has by now."""
        for transfer_id, (transfer, position) in list(self._ended.items()):
            if self._writer.committed >= position:
                del self._ended[transfer_id]
                self._by_idempotency.pop(transfer.idempotency_key or "", None)

    def forget_old(self) -> None:
        now = self._clock()
        self._released = {t: until for t, until in self._released.items() if until > now}
        self._writer.put(ForgetTransfers(self._clock() - self._retention))

    def close(self) -> None:
        """End long polls now; later ones don't wait."""
        self._closing = True
        for mailbox in self._mailboxes.values():
            mailbox.wake.set()

    def _admit(self, transfer: Transfer) -> None:
        self._active[transfer.id] = transfer
        self._active_keys += len(transfer.keys)
        self._mailbox(transfer.target).transfers[transfer.id] = transfer
        if transfer.idempotency_key is not None:
            self._by_idempotency[transfer.idempotency_key] = transfer
        heapq.heappush(self._deadlines, (transfer.deadline, transfer.id))

    def _end(
        self,
        transfer: Transfer,
        state: TransferState,
        detail: str,
        changed: Iterable[int] = (),
    ) -> None:
        known_to_target = transfer.offered is not None or transfer.state is TransferState.RUNNING
        by_target = state not in (TransferState.CANCELLED, TransferState.EXPIRED)
        rest = Outcome.FAILED if by_target else Outcome.CANCELLED
        positions = sorted({*changed, *transfer.settle(rest)})
        transfer.state, transfer.detail, transfer.ended = state, detail, self._clock()
        self._writer.put(transfer.update(positions))
        self._metrics.transfers.labels(state.value).inc()
        del self._active[transfer.id]
        self._turns.end(transfer.id)
        self._active_keys -= len(transfer.keys)
        self._ended[transfer.id] = transfer, self._writer.position
        mailbox = self._mailbox(transfer.target)
        del mailbox.transfers[transfer.id]
        if not by_target and known_to_target:
            mailbox.cancels[transfer.id] = _Cancel(until=self._clock() + _CANCEL_TTL)
        # Another may have its turn now.
        mailbox.wake.set()

    def _mailbox(self, node_id: str) -> _Mailbox:
        return self._mailboxes.setdefault(node_id, _Mailbox())
