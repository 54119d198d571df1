"""Transfers: scheduled movements of chunks to a node, from request to outcome.

The target executes. It polls for commands, pulls from the sources named, and posts progress.

    state             event                                        next
    -                 POST                                         queued
    -                 POST, dry run                                planned: answered, not kept
    queued            first progress from the target               running
    running           the target registers a new incarnation       running, offered again
    running           a server starts                              running, offered again by it
    queued, running   final progress: every key stored or present  done
                                      some keys                    partial
                                      no key                       failed
    queued, running   DELETE                                       cancelled, target told
    queued, running   its deadline                                 expired, target told
    done, partial     DELETE                                       unchanged, target told to hold no
                                                                   more
    any other         anything                                     unchanged

Keys without an outcome end as `failed` after final progress, else as `cancelled`. A target that
falls silent says nothing, so the deadline is what ends every transfer. What waits for a target is
`outgoing`'s, and whose turn it is to be handed out, and how many at once, `turns`'.

Servers that share a database share the transfers (`docs/decisions/0009`): each keeps in memory all
that have not ended, hands them out to the nodes that poll it, and takes what these say. It follows
the others by the change log. What excludes each other, SQL decides (`transfer_writes`), and what is
answered is read there (`records`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.errors import Busy, PeerRefused
from kvstrata.keys import Key
from kvstrata_server.clock import Clock
from kvstrata_server.metrics import Metrics
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.scheduling import history
from kvstrata_server.scheduling.outgoing import Outgoing
from kvstrata_server.scheduling.records import Records
from kvstrata_server.scheduling.requesting import Admission, digest_of, transfer_of
from kvstrata_server.scheduling.shown import Shown
from kvstrata_server.scheduling.speeds import Speeds
from kvstrata_server.scheduling.transfer import Transfer
from kvstrata_server.scheduling.transfer_writes import (
    AdvanceTransfer,
    EndTransfer,
    ForgetTransfers,
    PutTransfer,
    ReleaseHold,
)
from kvstrata_server.scheduling.turns import Turns
from kvstrata_server.scheduling.unended import Unended
from kvstrata_server.scheduling.watching import Watchers
from kvstrata_server.sql.changes import (
    HoldReleased,
    TransferAdvanced,
    TransferEnded,
    TransferMade,
    WorkEntry,
)
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.writer import Writer

__all__ = ["Scheduler"]

MAX_ACTIVE_KEYS = 4_000_000
# How long a target is told that a transfer was cancelled or has expired.
_NOTICE = 300.0


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
        log_as: str = "",
    ) -> None:
        """`orders(node)` are commands of other kinds that wait for a node. `log_as`: this server's
        name in the change log; empty: it has the database alone."""
        self._cluster = cluster
        self._database = database
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._retention = retention
        self._log_as = log_as
        self._outgoing = Outgoing(cluster, clock, turns, orders)
        self._speeds = Speeds()
        self._at_once = turns.per_node
        self._watchers = Watchers()
        self._unended = Unended(self._outgoing, clock)
        self._records = Records(database, writer, self._unended, alone=not log_as)
        self._forgetting: ForgetTransfers | None = None
        self._creating = asyncio.Lock()

    def __contains__(self, transfer_id: str) -> bool:
        """Whether it has not ended, as far as this server knows."""
        return transfer_id in self._unended

    @property
    def active(self) -> int:
        return len(self._unended)

    async def load(self) -> None:
        """Take up what SQL says has not ended, and let go of what has. At start, and after the
        change log was lost."""
        before = set(self._unended)
        found = {transfer.id: transfer for transfer in await history.unended(self._database)}
        for transfer_id in before.difference(found):
            self._unended.remove(transfer_id)
        for transfer in found.values():
            self._unended.add(transfer)
            if not self._log_as:  # else SQL is asked for keys that were used
                self._records.begun(transfer)
        for untold in await history.untold(self._database, self._clock(), _NOTICE):
            transfer_id, target, until = untold
            self._outgoing.notify(target, transfer_id, until)

    # ------------------------------------------------------------ requests

    async def create(
        self,
        asked: api.TransferRequest,
        idempotency_key: str | None,
        admission: Admission | None = None,
    ) -> Shown:
        """Raises `Missing` for an unknown target or source, `Malformed` for a source that serves
        no peers, `Conflict` where the idempotency key was used for another request, `Busy`.
        `admission` holds a new one to its tenant's quota, and raises `NoSpace`."""
        digest = digest_of(asked)
        await asyncio.sleep(0)
        write: PutTransfer | None = None
        async with self._creating:
            before = await self._records.same_request(idempotency_key, digest)
            transfer = before or await transfer_of(
                self._cluster, asked, idempotency_key, digest, self._clock(), admission
            )
            if before is None and not asked.dry_run:
                if self._unended.keys + len(transfer.keys) > MAX_ACTIVE_KEYS:
                    raise Busy(f"{self._unended.keys} keys are being transferred: try again later")
                self._writer.require_room()
                write = transfer.row(self._log_as)
                self._records.put(transfer.id, write)
                self._records.begun(transfer)
                if not self._log_as:
                    self._unended.add(transfer)
            sure = self._records.is_sure(transfer)
        if transfer.state is TransferState.PLANNED:
            return self._shown(transfer)
        # Accepted means that it outlives this process, for who asks again no less.
        await self._records.written(transfer.id)
        if self._log_as and (write is not None or not sure):
            transfer = await self._kept(transfer, write)
        return self._shown(transfer)

    async def _kept(self, transfer: Transfer, write: PutTransfer | None) -> Transfer:
        """This, or what another server was asked first with its key."""
        if write is None or write.kept != transfer.id:
            return await self._records.settled(transfer)
        self._unended.add(transfer)
        return transfer

    async def get(self, transfer_id: str) -> Shown:
        return self._shown(await self.find(transfer_id))

    def _shown(self, transfer: Transfer) -> Shown:
        """With what is known of its end, where that is to come."""
        shown = self._estimated(transfer)
        silence = "" if transfer.ended is not None else self._cluster.silence(transfer.target)
        if silence:
            shown.summary.detail = "; ".join(filter(None, (silence, transfer.detail)))
        return shown

    def _estimated(self, transfer: Transfer) -> Shown:
        """With an estimate, where it has not begun."""
        if transfer.state is TransferState.PLANNED:
            nbytes, source = transfer.bytes, next((s for s in transfer.sources if s), "")
        elif transfer.state is TransferState.QUEUED:
            nbytes = self._outgoing.nbytes(transfer)
            live = self._unended.get(transfer.id)
            source = live.waits_for if live is not None else ""
        else:
            return transfer.shown()
        unsized = not nbytes and Outcome.PENDING in transfer.outcomes
        if unsized or not self._speeds.knows(transfer.target):
            return transfer.shown()
        before = self._outgoing.before(transfer)
        return transfer.shown(
            self._speeds.estimate(source, transfer.target, nbytes, before, self._at_once)
        )

    async def summary(self, transfer_id: str) -> api.TransferSummary:
        """Counts instead of keys. Raises `Missing`."""
        self.expire()
        return await self._records.summary(transfer_id)

    async def page(self, after: str | None, limit: int, wanted: history.Wanted) -> api.TransferList:
        """In order of creation, counts instead of keys."""
        self.expire()
        return await self._records.page(after, limit, wanted)

    def watching(self, transfer_id: str) -> AbstractContextManager[asyncio.Event]:
        """An event that is set whenever the transfer may have changed, here or at another server,
        and when this one ends (`closing`)."""
        return self._watchers.watching(transfer_id)

    @property
    def closing(self) -> bool:
        return self._watchers.closed

    async def cancel(self, transfer_id: str) -> Shown:
        """One that has ended stays as it is, and its target is told to hold its chunks no more."""
        transfer = await self.find(transfer_id)
        if not transfer.state.ended:
            self._end(transfer, TransferState.CANCELLED, "cancelled by request")
            # The same, or what SQL has: it may have ended at another server first.
            transfer = await self.find(transfer_id)
            if transfer.state is TransferState.CANCELLED:
                return transfer.shown()
        until = transfer.holds_until
        if until > self._clock():
            transfer.released = True
            self._records.put(
                transfer_id,
                ReleaseHold(transfer_id, transfer.target, until, self._log_as),
            )
            self._outgoing.notify(transfer.target, transfer_id, until)
            await self._records.written(transfer_id)
        return transfer.shown()

    async def find(self, transfer_id: str) -> Transfer:
        """As it is told of (`records`). Raises `Missing`."""
        self.expire()
        return await self._records.find(transfer_id)

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
        return await self._outgoing.commands(node_id, incarnation, wait, hung_up, self.expire)

    async def progress(self, node_id: str, progress: api.Progress) -> api.ProgressReply:
        self._cluster.require_current(node_id, progress.incarnation)
        self.expire()
        transfer = self._unended.get(progress.transfer)
        if transfer is None:
            target, state = await self._records.standing(progress.transfer)
            if target == node_id and state.ended:
                self._outgoing.answered(node_id, progress.transfer)
                return api.ProgressReply(state=state)
            # What another server was asked for may not have been read here.
            transfer = await self.find(progress.transfer)
        if transfer.target != node_id:
            raise PeerRefused(f"transfer {transfer.id} is for {transfer.target!r}, not {node_id!r}")
        if transfer.state.ended:
            return api.ProgressReply(state=transfer.state)
        self._unended.add(transfer)
        transfer.taken_by = progress.incarnation
        changed = transfer.record(
            ((Key(bytes.fromhex(key)), o) for key, o in progress.outcomes.items()),
            {Key(bytes.fromhex(key)): source for key, source in progress.sources.items()},
        )
        self._metrics.moved_bytes.inc(max(0, progress.bytes - transfer.bytes))
        transfer.bytes = max(transfer.bytes, progress.bytes)
        transfer.detail = progress.detail or transfer.detail
        if progress.final:
            begun = transfer.offered if transfer.started is None else transfer.started
            if begun is not None:
                link = self._outgoing.link(transfer.id)
                self._speeds.saw(link, node_id, transfer.bytes, self._clock() - begun)
            write = self._end(transfer, None, transfer.detail, changed)
            await self._records.written(transfer.id)
            if write.state is None:
                raise Busy("the database did not take this: ask again; the log says why")
            return api.ProgressReply(state=write.state)
        self._advance(transfer, progress.incarnation, changed)
        return api.ProgressReply(state=transfer.state)

    def _advance(self, transfer: Transfer, incarnation: str, changed: Sequence[int]) -> None:
        transfer.state = TransferState.RUNNING
        transfer.started = transfer.started or self._clock()
        if transfer.id in self._unended:
            self._outgoing.taken(transfer)
        write = AdvanceTransfer(
            transfer.id,
            incarnation,
            self._outgoing.link(transfer.id),
            transfer.bytes,
            transfer.detail,
            transfer.chunks(changed),
            self._log_as,
        )
        self._records.put(transfer.id, write)
        self._watchers.wake(transfer.id)

    # ------------------------------------------------------------ the other servers

    async def take_up(self, entries: Iterable[WorkEntry]) -> None:
        """Of what the log says was made, what this server doesn't have."""
        made = [
            entry.id
            for entry in entries
            if isinstance(entry, TransferMade) and entry.id not in self._unended
        ]
        if made:
            for transfer in await history.unended(self._database, made):
                self._unended.add(transfer)

    def follow(self, entry: WorkEntry, ours: bool) -> None:
        """An entry of the log, by another server or (`ours`) this one: it took effect."""
        match entry:
            case TransferAdvanced():
                transfer = self._unended.get(entry.id)
                if transfer is not None and not ours:
                    transfer.state = TransferState.RUNNING
                    transfer.taken_by = entry.incarnation
                    transfer.bytes = max(transfer.bytes, entry.bytes)
                    self._outgoing.taken(transfer, entry.link)
            case TransferEnded():
                self._unended.remove(entry.id)
                if entry.state in (TransferState.CANCELLED, TransferState.EXPIRED):
                    # Whoever handed it out, and wherever the target asks next.
                    self._outgoing.notify(entry.target, entry.id, self._clock() + _NOTICE)
                if ours:
                    self._metrics.transfers.labels(entry.state.value).inc()
            case HoldReleased():
                self._outgoing.notify(entry.target, entry.id, entry.until)
            case TransferMade():
                pass  # taken up before
            case _:
                return  # of evictions
        self._watchers.wake(entry.id)

    # ------------------------------------------------------------ life

    def wake(self, node_id: str) -> None:
        """There is something for this node to do."""
        self._outgoing.wake(node_id)

    def expire(self) -> None:
        """End what is past its deadline."""
        for transfer in self._unended.late():
            late = "its deadline passed"
            if transfer.state is TransferState.QUEUED:
                late += " before its target took it"
            if silence := self._cluster.silence(transfer.target):
                late += f"; {silence}"
            self._end(transfer, TransferState.EXPIRED, late)

    def sweep(self) -> None:
        """Let go of what SQL has by now."""
        self._records.sweep()
        if self._forgetting is not None and self._forgetting.more:
            self.forget_old()

    def forget_old(self) -> None:
        self._unended.forget_old()
        self._outgoing.forget_old()
        self._forgetting = ForgetTransfers(self._clock() - self._retention)
        self._writer.put(self._forgetting)

    def close(self) -> None:
        """End long polls and watches now; later ones don't wait."""
        self._outgoing.close()
        self._watchers.close()

    def _end(
        self,
        transfer: Transfer,
        state: TransferState | None,
        detail: str,
        changed: Sequence[int] = (),
    ) -> EndTransfer:
        """None: by its target, as the outcomes say."""
        known_to_target = transfer.offered is not None or transfer.state is TransferState.RUNNING
        said, now = transfer.chunks(changed), self._clock()
        transfer.end(state, detail, now)
        write = EndTransfer(
            id=transfer.id,
            target=transfer.target,
            # Outcomes may have been posted at other servers.
            wanted=state if self._log_as else transfer.state,
            rest=Outcome.FAILED if state is None else Outcome.CANCELLED,
            ended=now,
            bytes=transfer.bytes,
            detail=detail,
            chunks=said,
            log_as=self._log_as,
        )
        self._records.put(transfer.id, write)
        self._unended.remove(transfer.id)
        self._records.ended(transfer)
        if not self._log_as:  # else when SQL has decided: see `follow`
            self._metrics.transfers.labels(transfer.state.value).inc()
            if state is not None and known_to_target:
                self._outgoing.notify(transfer.target, transfer.id, self._clock() + _NOTICE)
            self._watchers.wake(transfer.id)
        return write
