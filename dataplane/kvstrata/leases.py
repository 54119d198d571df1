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


class Leases:
    """All leases of a host tier. `unpin` ends one read of a chunk."""

    def __init__(self, unpin: Callable[[Chunk], None]) -> None:
        self.expired = 0
        self._unpin = unpin
        self._leases: dict[tuple[str, int], Lease] = {}
        # An entry is void when its lease has gone or got another time.
        self._heap: list[tuple[float, str, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, owner: str, id: int, expires: float) -> Lease:  # noqa: A002
        """The lease of that name, new if there is none, to end at `expires` or later."""
        lease = self._leases.get((owner, id))
        if lease is None:
            lease = self._leases[owner, id] = Lease(owner, id, expires)
        self._extend(lease, expires)
        return lease

    def renew(self, owner: str, ids: Iterable[int], now: float, expires: float) -> list[int]:
        """Extend leases; the ids of those that have lapsed."""
        lapsed = []
        for id_ in ids:
            lease = self._leases.get((owner, id_))
            if lease is None or lease.expires < now:
                lapsed.append(id_)
            else:
                self._extend(lease, expires)
        return lapsed

    def release(self, owner: str, ids: Iterable[int]) -> None:
        for id_ in ids:
            lease = self._leases.get((owner, id_))
            if lease is not None:
                self._let_go(lease)

    def begin(self, owner: str, id: int, keys: Sequence[Key]) -> bool:  # noqa: A002
        """False, and nothing has begun, if the lease does not hold all of the keys."""
        lease = self._leases.get((owner, id))
        if lease is None or any(key not in lease.held for key in keys):
            return False
        for key in keys:
            chunk = lease.held[key]
            chunk.io += 1
            lease.busy.setdefault(key, []).append(chunk)
        return True

    def end(self, owner: str, id: int, keys: Iterable[Key]) -> None:  # noqa: A002
        """Keys not being read are ignored."""
        lease = self._leases.get((owner, id))
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
            self._leases.pop((owner, id), None)

    def forget(self, owner: str) -> None:
        """Nothing of this owner reads any more."""
        for lease in [lease for lease in self._leases.values() if lease.owner == owner]:
            for reading in lease.busy.values():
                for chunk in reading:
                    self._unpin(chunk)
            lease.busy.clear()
            self._let_go(lease)

    def expire(self, now: float) -> None:
        """End the leases whose time has passed."""
        while self._heap and self._heap[0][0] < now:
            expires, owner, id_ = heapq.heappop(self._heap)
            lease = self._leases.get((owner, id_))
            if lease is not None and lease.expires == expires:
                self.expired += bool(lease.held)
                self._let_go(lease)

    def _extend(self, lease: Lease, expires: float) -> None:
        if expires > lease.expires or not lease.held:
            lease.expires = max(expires, lease.expires)
            heapq.heappush(self._heap, (lease.expires, lease.owner, lease.id))

    def _let_go(self, lease: Lease) -> None:
        for chunk in lease.held.values():
            chunk.readers -= 1
        lease.held.clear()
        if not lease.busy:
            self._leases.pop((lease.owner, lease.id), None)
