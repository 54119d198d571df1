"""Byte ranges of the region, handed out and taken back.

A first-fit allocator over free extents, merged when they touch. Chunks of one model have one
size, so the first extent nearly always fits; models of several sizes share the region at the
price of some fragmentation, which `largest_free` shows.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["ALIGNMENT", "Slots"]

# O_DIRECT, pinning and mapping all want whole pages.
ALIGNMENT = 4096


class Slots:
    """Allocator over `[0, capacity)`; offsets are aligned to `ALIGNMENT` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used = 0
        # Parallel and sorted by offset: a bisect and a memmove beat any tree at these counts.
        self._offsets: list[int] = [0] if self.capacity else []
        self._sizes: list[int] = [self.capacity] if self.capacity else []
        self._held: dict[int, int] = {}

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Bytes that a chunk of `nbytes` takes."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def largest_free(self) -> int:
        return max(self._sizes, default=0)

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a range of at least `nbytes`, or None if no extent is large enough."""
        size = self.rounded(nbytes)
        for i, free in enumerate(self._sizes):
            if free >= size:
                offset = self._offsets[i]
                if free == size:
                    del self._offsets[i], self._sizes[i]
                else:
                    self._offsets[i] += size
                    self._sizes[i] -= size
                self._held[offset] = size
                self.used += size
                return offset
        return None

    def free(self, offset: int) -> None:
        """Take back what `allocate` returned. A range that isn't held is a bug: KeyError."""
        size = self._held.pop(offset)
        self.used -= size
        i = bisect_left(self._offsets, offset)
        if i < len(self._offsets) and offset + size == self._offsets[i]:
            size += self._sizes[i]
            del self._offsets[i], self._sizes[i]
        if i and self._offsets[i - 1] + self._sizes[i - 1] == offset:
            self._sizes[i - 1] += size
        else:
            self._offsets.insert(i, offset)
            self._sizes.insert(i, size)
