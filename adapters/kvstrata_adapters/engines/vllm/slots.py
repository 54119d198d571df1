"""Slots of the region granted ahead of need, so that the scheduler can name one at once.

A store that finds too few of them can be put off: vLLM offers its chunks again in the next step,
while what a store left out is never offered again. `Shortage` says for how long that is worth it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from kvstrata.keys import Namespace

__all__ = ["Shortage", "SlotPool"]

# A store is put off for no longer than this: a node that runs at all has answered by then. One
# on a starved machine was seen to be kept from running for two seconds. vLLM logs a warning in each
# step, and a request that ends meanwhile is not stored at all.
_PATIENCE = 5.0
# After so many answers without a single slot the node is taken to be full.
_ANSWERS = 3


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
        self.asks = 0
        """How often the node was asked for slots, and how often it has answered."""
        self.answers = 0
        # The node grants by group; one group speaks for all of its size.
        self._speaker = {size: group for group, size in reversed(self.size_of.items())}

    def free(self, size: int) -> int:
        return len(self._free[size])

    def lacks(self, need: Counter[int]) -> bool:
        """Whether there are fewer slots than that of some size."""
        return any(count > self.free(size) for size, count in need.items())

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

    def asked(self) -> None:
        self.asks += 1

    def answered(self) -> None:
        self.answers += 1

    def clear(self) -> None:
        """The session is gone: its slots, and the answers that were due."""
        for free in self._free.values():
            free.clear()
        self.expected.clear()
        self._urgent.clear()
        self.answers = self.asks


class Shortage:
    """A request's store that found too few slots at `now`.

    It waits for the answer to what the node is asked now. If that brings slots, but too few, the
    store is made with them: the node has no more. If it brings none, waiting costs nothing, and the
    node is asked twice more. All that ends after `_PATIENCE` seconds.
    """

    def __init__(self, pool: SlotPool, now: float) -> None:
        self._pool = pool
        self._until = now + _PATIENCE
        self._due = pool.asks + 1
        self._left = _ANSWERS

    def waits(self, need: Counter[int], now: float) -> bool:
        """Whether a store that needs these slots, by size, and lacks some is to be put off."""
        pool = self._pool
        if now >= self._until:
            return False
        if pool.answers < self._due:
            return True
        if any(pool.free(size) for size in need):
            return False
        self._left -= 1
        self._due = pool.asks + 1
        return self._left > 0
