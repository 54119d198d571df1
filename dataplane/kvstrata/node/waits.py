"""Lookups that wait: for a promotion, or for someone who is writing the chunk.

Each waits for some keys, until they are settled or its time is over; then they are misses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstrata.host import Chunk, HostTier
from kvstrata.keys import Key

__all__ = ["Counters", "Settle", "Waits"]

Settle = Callable[[Sequence[Key], Sequence[Chunk | None]], None]
"""`settle(keys, chunks)`: keys of a lookup that were pending are ready and leased, or (None) a
miss. Called once per key, in batches."""


@dataclass(slots=True)
class Counters:
    """Monotonic counts. Every key asked ends in exactly one of `host_hits`, a tier's entry of
    `tier_hits`, or `misses`."""

    asked: int = 0
    host_hits: int = 0
    misses: int = 0
    tier_hits: dict[str, int] = field(default_factory=dict)
    promoted_bytes: int = 0
    late_promotions: int = 0
    no_room: int = 0
    tier_errors: int = 0


@dataclass(slots=True, eq=False)
class _Waiter:
    owner: str
    lease: int
    pending: set[Key]
    settle: Settle
    timer: asyncio.TimerHandle | None = None


class Waits:
    """Who waits for which key. A settled chunk is leased to all who waited for it."""

    def __init__(self, host: HostTier, counters: Counters, lease_ttl: float) -> None:
        self._host = host
        self._counters = counters
        self._lease_ttl = lease_ttl
        self._waiters: dict[Key, list[_Waiter]] = {}
        self._by_owner: dict[str, set[_Waiter]] = {}

    def add(self, owner: str, lease: int, keys: set[Key], settle: Settle, wait: float) -> None:
        """Wait for `keys`, at most `wait` seconds."""
        waiter = _Waiter(owner, lease, keys, settle)
        for key in keys:
            self._waiters.setdefault(key, []).append(waiter)
        self._by_owner.setdefault(owner, set()).add(waiter)
        loop = asyncio.get_running_loop()
        waiter.timer = loop.call_later(wait, self._give_up, waiter)

    def settle(self, keys: Sequence[Key], source: str = "") -> None:
        """These keys are decided: ready (then `source`, a tier, had them) or not to be had."""
        by_waiter: dict[_Waiter, list[Key]] = {}
        for key in keys:
            for waiter in self._waiters.pop(key, ()):
                by_waiter.setdefault(waiter, []).append(key)
        for waiter, settled in by_waiter.items():
            chunks = self._host.lease(waiter.owner, waiter.lease, settled, self._lease_ttl)
            hits = sum(chunk is not None for chunk in chunks)
            if source:
                self._counters.tier_hits[source] += hits
            else:
                self._counters.host_hits += hits
            self._finish(waiter, settled, chunks)

    def stop(self, owner: str, lease: int | None = None) -> None:
        """Nobody is there to be told any more (None: for any lease of the owner)."""
        waiters = self._by_owner.get(owner, ())
        for waiter in [w for w in waiters if lease in (None, w.lease)]:
            self._forget(waiter)
            self._counters.misses += len(waiter.pending)
            self._end(waiter)

    def _give_up(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        late = list(waiter.pending)
        self._counters.late_promotions += len(late)
        self._finish(waiter, late, [None] * len(late))

    def _forget(self, waiter: _Waiter) -> None:
        for key in waiter.pending:
            self._waiters[key].remove(waiter)
            if not self._waiters[key]:
                del self._waiters[key]

    def _finish(self, waiter: _Waiter, keys: Sequence[Key], chunks: Sequence[Chunk | None]) -> None:
        self._counters.misses += sum(chunk is None for chunk in chunks)
        waiter.pending.difference_update(keys)
        if not waiter.pending:
            self._end(waiter)
        waiter.settle(keys, chunks)

    def _end(self, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        mine = self._by_owner[waiter.owner]
        mine.discard(waiter)
        if not mine:
            del self._by_owner[waiter.owner]
