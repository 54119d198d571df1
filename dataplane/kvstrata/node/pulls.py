"""Transfers: chunks brought to this node because the control plane asked.

What the node can get from its own tiers is promoted, the rest is pulled from the sources in
order; a source that fails is replaced by the next. Bytes land in reserved slots and become
readable only after verification. What someone else is writing is waited for, and is as good; if
that fails the sources are asked after all. A pull that is cancelled stops waiting, but the batch
under way ends by itself: a transport may still be writing to its slots.

A node that is drained pulls nothing, and what a batch under way brings is given up: that its source
has it need not be true any more when the node is stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstrata.api import Outcome
from kvstrata.errors import KVStrataError, Missing
from kvstrata.host import NO_ROOM
from kvstrata.keys import DIGEST_BYTES, Key, Namespace
from kvstrata.node.reported import Pull, PullResult, PullSource
from kvstrata.node.store import Store
from kvstrata.tiers import base
from kvstrata.tiers.base import Item

__all__ = ["Fetcher", "Pulls"]

_log = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20

# Leases of a pull: what it needs while it works, what it was asked to keep after, and that until
# the server has its result: who asked counts from there.
_WORK, _HOLD, _UNTOLD = 1, 2, 3
# More than a try to tell it takes, at all servers, with the wait before it.
_UNTOLD_TTL = 60.0
_DRAINED = "this node is drained, and takes no new chunks"

_OUTCOMES = {
    base.Outcome.LOADED: Outcome.STORED,
    base.Outcome.MISSING: Outcome.MISSING,
    base.Outcome.CORRUPT: Outcome.CORRUPT,
    base.Outcome.NO_ROOM: Outcome.NO_ROOM,
}


class Fetcher(Protocol):
    """What gets chunks from a peer into slots; see `kvstrata.tiers.peer_links.PeerLinks`."""

    @property
    def reasons(self) -> Mapping[str, str]:
        """By address, why it last failed."""
        ...

    async def fetch(
        self, address: str, namespace: Namespace, items: Sequence[Item], deadline: float
    ) -> list[base.Outcome]: ...


@dataclass(slots=True)
class _State:
    """One pull under way."""

    pull: Pull
    owner: str
    outcomes: dict[Key, Outcome] = field(default_factory=dict)
    busy: set[Key] = field(default_factory=set)
    """Keys that others were writing, so that not every source was asked for them."""
    sources: dict[Key, str] = field(default_factory=dict)
    moved: int = 0
    trouble: list[str] = field(default_factory=list)
    unwanted: bool = False

    def note(self, key: Key, outcome: Outcome) -> None:
        """What one source came to. A key is missing if all of them said so."""
        if outcome is not Outcome.MISSING:
            self.outcomes[key] = outcome
        else:
            self.outcomes.setdefault(key, outcome)


class Pulls:
    def __init__(self, store: Store, links: Fetcher) -> None:
        self.chunks = 0
        self.bytes = 0
        self._store = store
        self._links = links
        self._tasks: set[asyncio.Task[None]] = set()
        self._untold: dict[str, tuple[list[Key], float]] = {}

    async def pull(self, pull: Pull) -> PullResult:
        """Execute a transfer; see `kvstrata.node.reported`. One outcome per key, always."""
        if self._store.draining:
            return PullResult(dict.fromkeys(pull.keys, Outcome.NO_ROOM), detail=_DRAINED)
        state = _State(pull, _owner(pull.transfer))
        for document in pull.namespaces:
            try:
                self._store.namespaces.add(Namespace.parse(document))
            except KVStrataError as e:
                state.trouble.append(str(e))
        wanted = self._within_budget(state)
        try:
            await self._get(state, wanted)
        except asyncio.CancelledError:
            state.unwanted = True
            self._store.host.release(state.owner, [_WORK])
            raise
        self._hold(state)
        return PullResult(
            {key: state.outcomes.get(key, Outcome.MISSING) for key in pull.keys},
            state.sources,
            state.moved,
            "; ".join(dict.fromkeys(state.trouble))[:2000],
        )

    async def _get(self, state: _State, wanted: Sequence[Key]) -> None:
        """Everything that can be had before the deadline, leased, and what became of the rest."""
        pull = state.pull
        # What is brought up from a tier may evict.
        left = await self._find(state, wanted, 0.0 if pull.free_only else self._wait(pull))
        while left:
            state.busy.clear()
            for source in pull.sources:
                if not left or self._too_late(pull):
                    break
                task = asyncio.create_task(self._fetch_all(state, source, left))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await asyncio.shield(task)
                left = [k for k in left if state.outcomes.get(k) is not Outcome.STORED]
            busy = [k for k in left if k in state.busy]
            left = await self._find(state, busy, self._wait(pull))
            if self._too_late(pull):
                break
        if self._too_late(pull):
            self._give_up(state, wanted)

    async def _find(self, state: _State, keys: Sequence[Key], wait: float) -> list[Key]:
        """Lease what is here, or comes within `wait` seconds; the others."""
        if not keys:
            return []
        here = await self._store.find(state.owner, _WORK, keys, "all", wait)
        state.outcomes |= dict.fromkeys(here, Outcome.PRESENT)
        return [key for key in keys if key not in here]

    def _give_up(self, state: _State, wanted: Sequence[Key]) -> None:
        """Time is over: who had what did not come may not have been asked."""
        failed = [k for k in wanted if state.outcomes.get(k, Outcome.MISSING) is Outcome.MISSING]
        if failed and state.pull.sources:
            state.outcomes |= dict.fromkeys(failed, Outcome.FAILED)
            state.trouble.append(f"{len(failed)} chunks were not here before the deadline")

    def release(self, transfer: str) -> None:
        """Nobody needs what it brought any more: end its hold."""
        self._untold.pop(transfer, None)
        self._store.host.release(_owner(transfer), [_WORK, _HOLD, _UNTOLD])

    def keep(self, transfer: str) -> None:
        """The server could not be told yet; what the transfer holds stays until it is."""
        if transfer in self._untold:
            self._store.host.renew(_owner(transfer), [_UNTOLD], _UNTOLD_TTL)

    def told(self, transfer: str) -> None:
        """The server has its result: held as long as was asked for, from now on."""
        keys, hold = self._untold.pop(transfer, ((), 0.0))
        if keys:
            self._store.host.lease(_owner(transfer), _HOLD, keys, hold)
            self._store.host.release(_owner(transfer), [_UNTOLD])

    async def close(self) -> None:
        """Return when no batch is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _too_late(self, pull: Pull) -> bool:
        return self._store.clock() >= pull.deadline

    def _wait(self, pull: Pull) -> float:
        left = pull.deadline - self._store.clock()
        return max(0.0, min(left, self._store.settings.pending_deadline))

    def _within_budget(self, state: _State) -> list[Key]:
        """The keys to get: known, once each, and within the byte budget, of which those take
        nothing that are in host memory already."""
        wanted: list[Key] = []
        budget, used = state.pull.byte_budget, 0
        for key in dict.fromkeys(state.pull.keys):
            try:
                size = self._store.namespaces.size_of(key)
            except Missing as e:
                state.outcomes[key] = Outcome.MISSING
                state.trouble.append(str(e))
                continue
            if budget is not None and self._store.host.get(key) is None:
                if used + size > budget:
                    state.outcomes[key] = Outcome.NO_ROOM
                    continue
                used += size
            wanted.append(key)
        return wanted

    async def _fetch_all(self, state: _State, source: PullSource, keys: Sequence[Key]) -> None:
        for namespace, batch in self._batches(keys):
            if state.unwanted or self._too_late(state.pull):
                return
            if self._store.draining:
                state.outcomes |= dict.fromkeys((key for key, _ in batch), Outcome.NO_ROOM)
                state.trouble.append(_DRAINED)
                continue
            await self._fetch(state, source, namespace, batch)

    async def _fetch(
        self,
        state: _State,
        source: PullSource,
        namespace: Namespace,
        batch: Sequence[tuple[Key, int]],
    ) -> None:
        host, owner = self._store.host, f"pull:{source.address}:{id(batch)}"
        items = []
        offsets = host.reserve(owner, batch, evict=not state.pull.free_only)
        for (key, nbytes), offset in zip(batch, offsets, strict=True):
            if offset >= 0:
                items.append(Item(key, self._store.region[offset : offset + nbytes], offset))
            elif offset == NO_ROOM:
                state.note(key, Outcome.NO_ROOM)
            else:
                state.busy.add(key)
        try:
            outcomes = await self._links.fetch(
                source.address, namespace, items, state.pull.deadline
            )
        except Exception as e:
            if not isinstance(e, KVStrataError):
                _log.exception("fetching from %s failed", source.node)
            state.trouble.append(f"{source.node}: {e}")
            outcomes = [base.Outcome.FAILED] * len(items)
        else:
            if failed := outcomes.count(base.Outcome.FAILED):
                told = f"{failed} of {len(items)} chunks did not arrive"
                why = self._links.reasons.get(source.address, told)
                state.trouble.append(f"{source.node}: {why}")
        if self._store.draining:
            state.trouble.append(_DRAINED)
            outcomes = [base.Outcome.NO_ROOM] * len(items)
        loaded = [i for i, o in zip(items, outcomes, strict=True) if o is base.Outcome.LOADED]
        host.commit(owner, [item.key for item in loaded])
        host.forget(owner)
        if not state.unwanted:
            # Leased at once: the next batch must not evict what this one brought.
            ttl = self._store.settings.lease_ttl
            host.lease(state.owner, _WORK, [i.key for i in loaded], ttl)
        for item, outcome in zip(items, outcomes, strict=True):
            state.note(item.key, _OUTCOMES.get(outcome, Outcome.FAILED))
        state.sources |= {item.key: source.node for item in loaded}
        nbytes = sum(len(item.view) for item in loaded)
        state.moved += nbytes
        self.bytes += nbytes
        self.chunks += len(loaded)

    def _hold(self, state: _State) -> None:
        arrived = [k for k, o in state.outcomes.items() if o in (Outcome.STORED, Outcome.PRESENT)]
        if state.pull.hold > 0 and arrived:
            held = self._store.host.lease(state.owner, _HOLD, arrived, state.pull.hold)
            # A batch that took longer than a lease may have cost what came before it.
            gone = [key for key, chunk in zip(arrived, held, strict=True) if chunk is None]
            state.outcomes |= dict.fromkeys(gone, Outcome.NO_ROOM)
            if gone:
                state.trouble.append(f"{len(gone)} chunks were evicted before the transfer ended")
            self._store.host.lease(state.owner, _UNTOLD, arrived, _UNTOLD_TTL)
            self._untold[state.pull.transfer] = arrived, state.pull.hold
        self._store.host.release(state.owner, [_WORK])

    def _batches(self, keys: Sequence[Key]) -> list[tuple[Namespace, list[tuple[Key, int]]]]:
        """Keys by namespace, a bounded number of bytes at a time."""
        namespaces = self._store.namespaces
        by_digest: dict[bytes, list[list[tuple[Key, int]]]] = {}
        limit = min(_BATCH_BYTES, self._store.host.slots.capacity // 4)
        sizes: dict[bytes, int] = {}
        for key in keys:
            digest, nbytes = key[:DIGEST_BYTES], namespaces.size_of(key)
            batches = by_digest.setdefault(digest, [])
            if not batches or sizes[digest] + nbytes > limit:
                batches.append([])
                sizes[digest] = 0
            batches[-1].append((key, nbytes))
            sizes[digest] += nbytes
        return [
            (namespace, batch)
            for digest, batches in by_digest.items()
            if (namespace := namespaces.get(digest)) is not None
            for batch in batches
        ]


def _owner(transfer: str) -> str:
    return f"transfer:{transfer}"
