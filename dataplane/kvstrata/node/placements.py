"""What changed at this node's locations since the last report.

Coalesced per key, so its size is bounded by the chunks the node has and has lost since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstrata.keys import Key
from kvstrata.wire import Told

__all__ = ["PlacementChange", "Placements", "Watcher"]


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """Chunks that appeared at or left `location`: `host`, or the id of a store.

    No key is in both lists.
    """

    location: str
    added: Sequence[Key] = ()
    removed: Sequence[Key] = ()


class Watcher(Protocol):
    """Hears of every change at once, in order, and of what engines tell of chunks."""

    def added(self, location: str, keys: Sequence[Key]) -> None: ...

    def removed(self, location: str, keys: Sequence[Key]) -> None: ...

    def told(self, tells: Sequence[Told]) -> None: ...


class Placements:
    """Collects changes while `enabled`, that is while somebody takes them."""

    def __init__(self) -> None:
        self.enabled = False
        self.watchers: list[Watcher] = []
        self._last: dict[str, dict[Key, bool]] = {}

    def added(self, location: str, keys: Sequence[Key]) -> None:
        for watcher in self.watchers if keys else ():
            watcher.added(location, keys)
        if self.enabled and keys:
            self._last.setdefault(location, {}).update(dict.fromkeys(keys, True))

    def removed(self, location: str, keys: Sequence[Key]) -> None:
        for watcher in self.watchers if keys else ():
            watcher.removed(location, keys)
        if self.enabled and keys:
            self._last.setdefault(location, {}).update(dict.fromkeys(keys, False))

    def told(self, tells: Sequence[Told]) -> None:
        for watcher in self.watchers if tells else ():
            watcher.told(tells)

    def take(self) -> list[PlacementChange]:
        """All changes since the last take; the last word on each key."""
        last, self._last = self._last, {}
        return [
            PlacementChange(
                location,
                [key for key, here in changes.items() if here],
                [key for key, here in changes.items() if not here],
            )
            for location, changes in last.items()
        ]
