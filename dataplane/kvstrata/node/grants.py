"""Chunks lent to peers: what a peer port serves, drawn from the store.

A grant is a lease in the host tier under a random name that only its peer learns. A transport
that serves reads itself asks `authorize`; one-sided reads can't be checked here, which is why
the reader verifies checksums.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.errors import Missing
from kvstrata.host import Chunk, State
from kvstrata.keys import Key, Namespace
from kvstrata.node.peer_source import Grant, GrantedChunk
from kvstrata.node.store import Store
from kvstrata.tiers.base import checksum

__all__ = ["Grants"]


@dataclass(frozen=True, slots=True)
class _Granted:
    peer: str
    lease: int
    expires: float
    # Sorted by offset; one range a chunk.
    offsets: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class Grants:
    """A `PeerSource` over a store. `most_ttl` bounds what a peer may ask for, in seconds."""

    def __init__(self, store: Store, most_ttl: float) -> None:
        self.lent = 0
        self._store = store
        self._most_ttl = most_ttl
        # Replaced, never changed, under a key: transport threads read it without a lock.
        self._granted: dict[bytes, _Granted] = {}
        self._next = 0

    def namespaces(self) -> list[Namespace]:
        return self._store.namespaces.all()

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        """Which are readable in the host tier now."""
        return [state is State.READY for state in self._store.host.find(keys)]

    async def grant(self, peer: str, keys: Sequence[Key], ttl: float, wait: float) -> Grant:
        self._sweep()
        self._next += 1
        lease, owner = self._next, _owner(peer)
        ttl = min(ttl, self._most_ttl, self._store.settings.lease_ttl)
        wait = min(wait, self._store.settings.pending_deadline)
        found = await self._store.find(owner, lease, self._known(keys), "all", wait)
        try:
            await self._add_checksums(list(found.values()))
        except asyncio.CancelledError:
            self._store.abandon(owner, lease)
            raise
        found = self._still_here(owner, lease, found, ttl)
        token = secrets.token_bytes(16)
        ranges = sorted((c.offset, c.offset + c.nbytes) for c in found.values())
        self._granted[token] = _Granted(
            peer,
            lease,
            self._store.clock() + ttl,
            [start for start, _ in ranges],
            [end for _, end in ranges],
        )
        self.lent += len(found)
        return Grant(token, ttl, [_describe(found.get(key)) for key in keys])

    def release_grant(self, peer: str, lease: bytes) -> None:
        granted = self._granted.get(lease)
        if granted is not None and granted.peer == peer:
            del self._granted[lease]
            self._store.host.release(_owner(peer), [granted.lease])

    def peer_gone(self, peer: str) -> None:
        for token in [token for token, g in self._granted.items() if g.peer == peer]:
            del self._granted[token]
        self._store.forget(_owner(peer))

    def authorize(self, lease: bytes, offset: int, nbytes: int) -> bool:
        granted = self._granted.get(lease)
        if granted is None or granted.expires < self._store.clock():
            return False
        i = bisect_right(granted.offsets, offset) - 1
        return i >= 0 and 0 < nbytes <= granted.ends[i] - offset

    def _still_here(
        self, owner: str, lease: int, found: dict[Key, Chunk], ttl: float
    ) -> dict[Key, Chunk]:
        """Those that were here all the time, leased from now on. A lease may have lapsed while
        others were waited for; the checksum would then be that of whatever came after."""
        held = self._store.host.lease(owner, lease, list(found), ttl)
        pairs = zip(found.items(), held, strict=True)
        return {key: chunk for (key, chunk), now in pairs if now is chunk}

    def _known(self, keys: Sequence[Key]) -> list[Key]:
        known = []
        for key in keys:
            try:
                self._store.namespaces.size_of(key)
            except Missing:
                continue
            known.append(key)
        return known

    def _sweep(self) -> None:
        now = self._store.clock()
        for token in [token for token, g in self._granted.items() if g.expires < now]:
            del self._granted[token]

    async def _add_checksums(self, chunks: Sequence[Chunk]) -> None:
        fresh = [(c, self._store.item(c).view) for c in chunks if c.checksum is None]
        if fresh:
            sums = await asyncio.to_thread(lambda: [checksum(view) for _, view in fresh])
            for (chunk, _), value in zip(fresh, sums, strict=True):
                chunk.checksum = value


def _owner(peer: str) -> str:
    return f"peer:{peer}"


def _describe(chunk: Chunk | None) -> GrantedChunk | None:
    if chunk is None or chunk.checksum is None:
        return None
    return GrantedChunk(chunk.offset, chunk.nbytes, chunk.checksum)
