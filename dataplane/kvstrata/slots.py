"""Byte ranges of the region, handed out and taken back.

Slots of one size, a *size class*, live together in slabs, so that models of different chunk
sizes share a region without leaving it in splinters. A slab is a run of slots carved from the
common pool, and goes back there when its last slot is freed. It is as long as fits in
`slab_bytes`, at least one slot: chunks larger than that get a range of their own. A slab is
shorter where the pool has no room for a full one, so that a small region, or the last corner of
a large one, is used to its last page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

__all__ = ["ALIGNMENT", "Slab", "Slots"]

# O_DIRECT, pinning and mapping all want whole pages.
ALIGNMENT = 4096

# A slab is the grain at which one size class yields to another: small against the region, and
# long enough that carving it costs nothing per chunk.
_SLABS_PER_REGION = 64
_MAX_SLAB_BYTES = 64 << 20


class Slab:
    """`slots` ranges of `size` bytes from `offset` on; `free` are the offsets not handed out."""

    __slots__ = ("free", "offset", "size", "slots")

    def __init__(self, offset: int, size: int, slots: int) -> None:
        self.offset = offset
        self.size = size
        self.slots = slots
        # Taken from the end, lowest first: a chain's chunks lie one behind the other.
        self.free = list(range(offset + (slots - 1) * size, offset - 1, -size))

    @property
    def nbytes(self) -> int:
        return self.size * self.slots

    @property
    def held(self) -> int:
        """How many of its slots are handed out."""
        return self.slots - len(self.free)


class Slots:
    """Allocator over `[0, capacity)`; offsets are aligned to `ALIGNMENT` bytes."""

    def __init__(self, capacity: int, slab_bytes: int | None = None) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used = 0
        if slab_bytes is None:
            slab_bytes = min(_MAX_SLAB_BYTES, self.capacity // _SLABS_PER_REGION)
        self.slab_bytes = slab_bytes
        self._pool = _Extents(self.capacity)
        self._held: dict[int, Slab] = {}
        # By slot size: the slabs with a free slot, in the order they are filled up.
        self._partial: dict[int, dict[Slab, None]] = {}

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Bytes that a chunk of `nbytes` takes."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def largest_free(self) -> int:
        """The longest range that belongs to no slab, in bytes: a chunk of any size up to this
        fits. Free slots of slabs come on top, for chunks of their size."""
        return self._pool.largest

    def room(self, nbytes: int, enough: int) -> int:
        """How many chunks of `nbytes` fit now; counted up to `enough`."""
        size = self.rounded(nbytes)
        count = 0
        for slab in self._partial.get(size, ()):
            count += len(slab.free)
            if count >= enough:
                return enough
        return min(count + self._pool.room(size, enough - count), enough)

    def slab_of(self, offset: int) -> Slab:
        """The slab of a slot that is held."""
        return self._held[offset]

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of at least `nbytes`, or None if there is none."""
        return next(iter(self.allocate_many(nbytes, 1)), None)

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        """Up to `count` offsets: fewer if no more fit."""
        size = self.rounded(nbytes)
        partial = self._partial.get(size) or {}
        offsets: list[int] = []
        while (want := count - len(offsets)) > 0:
            slab = next(iter(partial), None)
            if slab is None:
                slab = self._carve(size)
                if slab is None:
                    break
                partial = self._partial.setdefault(size, {})
                partial[slab] = None
            free = slab.free
            taken = free[-want:]
            del free[-want:]
            if not free:
                del partial[slab]
            taken.reverse()
            self._held.update(dict.fromkeys(taken, slab))
            offsets += taken
        self.used += size * len(offsets)
        return offsets

    def free(self, offset: int) -> None:
        """Take back what was allocated. A range that isn't held is a bug: KeyError."""
        self.free_many((offset,))

    def free_many(self, offsets: Iterable[int]) -> None:
        """`free` for each."""
        pop = self._held.pop
        slab: Slab | None = None
        for offset in offsets:
            mine = pop(offset)
            if mine is not slab:
                self._settle(slab)
                slab = mine
            mine.free.append(offset)
            self.used -= mine.size
        self._settle(slab)

    def _carve(self, size: int) -> Slab | None:
        slots = max(1, self.slab_bytes // size)
        offset = self._pool.take(slots * size)
        if offset is None:
            slots = self._pool.largest // size
            offset = self._pool.take(slots * size) if slots else None
        return None if offset is None else Slab(offset, size, slots)

    def _settle(self, slab: Slab | None) -> None:
        """After slots of a slab were freed: it has some to give, or is empty and ends."""
        if slab is None:
            return
        partial = self._partial.setdefault(slab.size, {})
        if len(slab.free) < slab.slots:
            partial[slab] = None
            return
        partial.pop(slab, None)
        if not partial:
            del self._partial[slab.size]
        self._pool.give(slab.offset, slab.nbytes)


class _Extents:
    """Free ranges in order of offset, merged when they touch; the first that is long enough is
    taken."""

    def __init__(self, capacity: int) -> None:
        # Parallel lists: a bisect and a memmove beat any tree at these counts.
        self._offsets: list[int] = [0] if capacity else []
        self._sizes: list[int] = [capacity] if capacity else []

    @property
    def largest(self) -> int:
        return max(self._sizes, default=0)

    def room(self, size: int, enough: int) -> int:
        count = 0
        for free in self._sizes:
            if count >= enough:
                break
            count += free // size
        return count

    def take(self, size: int) -> int | None:
        for i, free in enumerate(self._sizes):
            if free >= size:
                offset = self._offsets[i]
                if free == size:
                    del self._offsets[i], self._sizes[i]
                else:
                    self._offsets[i] += size
                    self._sizes[i] -= size
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        i = bisect_left(self._offsets, offset)
        if i < len(self._offsets) and offset + size == self._offsets[i]:
            size += self._sizes[i]
            del self._offsets[i], self._sizes[i]
        if i and self._offsets[i - 1] + self._sizes[i - 1] == offset:
            self._sizes[i - 1] += size
        else:
            self._offsets.insert(i, offset)
            self._sizes.insert(i, size)
