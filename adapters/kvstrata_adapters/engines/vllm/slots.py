"""Slots of the region granted ahead of need, so that the scheduler can name one at once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from kvstrata.keys import Namespace

__all__ = ["SlotPool"]


class SlotPool:
    """Free slots by chunk size: groups whose chunks have one size share them.

    `floor` slots are held at any time, up to `most` while more are expected to be needed.
    """

    def __init__(self, namespace: Namespace, most: int, floor: int = 8) -> None:
        self.size_of: dict[int, int] = dict(namespace.chunk_bytes)
        self.expected: Counter[int] = Counter()
        self._most = most
        self._floor = min(floor, most)
        self._free: dict[int, deque[int]] = {size: deque() for size in self.size_of.values()}
        self._urgent: Counter[int] = Counter()
        # The node grants by group; one group speaks for all of its size.
        self._speaker = {size: group for group, size in reversed(self.size_of.items())}

    def free(self, size: int) -> int:
        return len(self._free[size])

    def take(self, size: int) -> int | None:
        return self._free[size].popleft() if self._free[size] else None

    def add(self, group: int, offsets: Iterable[int]) -> None:
        self._free[self.size_of[group]].extend(offsets)

    def need(self, size: int, count: int) -> None:
        """Hold `count` at the next chance, whatever the bound."""
        self._urgent[size] = max(self._urgent[size], count)

    def wanted(self) -> dict[int, int]:
        """By speaking group how many slots to hold, where fewer are held now."""
        wanted = {}
        for size, free in self._free.items():
            level = min(self._floor + self.expected[size], self._most)
            level = max(level, self._urgent.pop(size, 0))
            if level > len(free):
                wanted[self._speaker[size]] = level
        return wanted

    def clear(self) -> None:
        for free in self._free.values():
            free.clear()
        self.expected.clear()
        self._urgent.clear()
