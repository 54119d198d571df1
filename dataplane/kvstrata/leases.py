"""Who may read which chunks until when, and who is at it.

A lease is named by its owner and a number of the owner's. It keeps the chunks it holds from
eviction until it is released or its time passes. `begin` and `end` bracket a read: what is being
read stays in place even after the lease.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstrata.chunks import Chunk
from kvstrata.keys import Key

__all__ = ["Lease", "Leases"]


@dataclass(slots=True, eq=False)
class Lease:
    """`held` chunks count it among their `readers`; `busy` are the reads begun and not ended."""

    owner: str
    id: int
    expires: float
    held: dict[Key, Chunk] = field(default_factory=dict)
    busy: dict[Key, list[Chunk]] = field(default_factory=dict)
    queued: bool = False


class Leases:
    """All leases of a host tier. `unpin` ends one read of a chunk."""

    def __init__(self, unpin: Callable[[Chunk], None]) -> None:
        self.expired = 0
        self._unpin = unpin
        self._by_owner: dict[str, dict[int, Lease]] = {}
        # One entry a lease, however often it is renewed: an entry that comes up too early goes
        # back with the lease's time of then.
        self._heap: list[tuple[float, int, Lease]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def open(self, owner: str, id: int, expires: float) -> Lease:  # noqa: A002
        """The lease of that name, new if there is none, to end at `expires` or later."""
        mine = self._by_owner.setdefault(owner, {})
        lease = mine.get(id)
        if lease is None:
            lease = mine[id] = Lease(owner, id, expires)
        lease.expires = max(expires, lease.expires)
        if not lease.queued:
            self._push(lease)
        return lease

    def renew(self, owner: str, ids: Iterable[int], now: float, expires: float) -> list[int]:
        """Extend leases; the ids of those that have lapsed."""
        lapsed = []
        for id_ in ids:
            lease = self._get(owner, id_)
            if lease is None or lease.expires < now:
                lapsed.append(id_)
            else:
                lease.expires = max(expires, lease.expires)
        return lapsed

    def release(self, owner: str, ids: Iterable[int]) -> None:
        for id_ in ids:
            lease = self._get(owner, id_)
            if lease is not None:
                self._let_go(lease)

    def begin(self, owner: str, id: int, keys: Sequence[Key]) -> bool:  # noqa: A002
        """False, and nothing has begun, if the lease does not hold all of the keys."""
        lease = self._get(owner, id)
        if lease is None or any(key not in lease.held for key in keys):
            return False
        for key in keys:
            chunk = lease.held[key]
            chunk.io += 1
            lease.busy.setdefault(key, []).append(chunk)
        return True

    def end(self, owner: str, id: int, keys: Iterable[Key]) -> None:  # noqa: A002
        """Keys not being read are ignored."""
        lease = self._get(owner, id)
        if lease is None:
            return
        for key in keys:
            reading = lease.busy.get(key)
            if not reading:
                continue
            self._unpin(reading.pop())
            if not reading:
                del lease.busy[key]
        if not lease.held and not lease.busy:
            self._remove(lease)

    def forget(self, owner: str) -> None:
        """Nothing of this owner reads any more."""
        for lease in list(self._by_owner.get(owner, {}).values()):
            for reading in lease.busy.values():
                for chunk in reading:
                    self._unpin(chunk)
            lease.busy.clear()
            self._let_go(lease)

    def expire(self, now: float) -> None:
        """End the leases whose time has passed."""
        while self._heap and self._heap[0][0] < now:
            lease = heapq.heappop(self._heap)[2]
            lease.queued = False
            if self._get(lease.owner, lease.id) is not lease:
                continue
            if lease.expires >= now:
                self._push(lease)
            else:
                self.expired += bool(lease.held)
                self._let_go(lease)

    def _get(self, owner: str, id: int) -> Lease | None:  # noqa: A002
        return self._by_owner.get(owner, {}).get(id)

    def _push(self, lease: Lease) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (lease.expires, self._pushed, lease))
        lease.queued = True

    def _remove(self, lease: Lease) -> None:
        mine = self._by_owner.get(lease.owner, {})
        if mine.get(lease.id) is lease:
            del mine[lease.id]
            if not mine:
                del self._by_owner[lease.owner]

    def _let_go(self, lease: Lease) -> None:
        for chunk in lease.held.values():
            chunk.readers -= 1
        lease.held.clear()
        if not lease.busy:
            self._remove(lease)
