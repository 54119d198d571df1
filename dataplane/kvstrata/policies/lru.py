"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstrata.keys import Key
from kvstrata.policies.base import Policy

__all__ = ["Lru"]


class Lru(Policy):
    """Least recently used. A chain that grows is used: its head stays younger than its tail."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, keys: Sequence[Key], nbytes: int, after: Sequence[Key] = ()) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)
            else:
                order[key] = None
        self.touch(after)

    def touch(self, keys: Sequence[Key]) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def remove(self, keys: Sequence[Key]) -> None:
        pop = self._order.pop
        for key in keys:
            pop(key, None)

    def victims(self) -> Iterator[Key]:
        return iter(self._order)
