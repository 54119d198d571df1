"""Adaptive replacement: how much memory recency deserves, learned from what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstrata.keys import Key
from kvstrata.policies.base import Policy
from kvstrata.policies.sized import Sized

__all__ = ["Arc"]


class Arc(Policy):
    """ARC (Megiddo and Modha, FAST 2003), counted in bytes.

    Chunks used once since they came are in `recent`, those used again in `frequent`; each list
    remembers the names of what it lately gave up. A chunk that comes back from such a ghost shows
    that its list was too short, and moves the target of `recent`.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.target = 0.0
        """Bytes that `recent` may have before it gives up chunks first."""
        self._recent = Sized()
        self._frequent = Sized()
        self._ghosts_of_recent = Sized()
        self._ghosts_of_frequent = Sized()

    def insert(self, keys: Sequence[Key], nbytes: int, after: Sequence[Key] = ()) -> None:
        recent, frequent = self._recent, self._frequent
        new: list[Key] = []
        for key in reversed(keys):
            if key in recent:
                recent.move_to_end(key)
            elif key in frequent:
                frequent.move_to_end(key)
            elif self._returned(key):
                frequent.put(key, nbytes)
            else:
                new.append(key)
        recent.put_all(new, nbytes)
        self._trim()
        for key in reversed(after):
            if key in recent:
                recent.move_to_end(key)
            elif key in frequent:
                frequent.move_to_end(key)

    def touch(self, keys: Sequence[Key]) -> None:
        recent, frequent = self._recent, self._frequent
        for key in reversed(keys):
            if key in frequent:
                frequent.move_to_end(key)
            elif (nbytes := recent.take(key)) is not None:
                frequent.put(key, nbytes)

    def remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if self._recent.take(key) is None:
                self._frequent.take(key)

    def evict(self, keys: Sequence[Key]) -> None:
        others = self._recent.move(keys, self._ghosts_of_recent)
        self._frequent.move(others, self._ghosts_of_frequent)
        self._trim()

    def victims(self) -> Iterator[Key]:
        recent, left = iter(self._recent.items()), self._recent.nbytes
        if left > self.target:
            for key, nbytes in recent:
                yield key
                left -= nbytes
                if left <= self.target:
                    break
        yield from self._frequent
        for key, _ in recent:
            yield key

    def _returned(self, key: Key) -> bool:
        """Whether a chunk that comes is remembered; the target learns from it."""
        recent, frequent = self._ghosts_of_recent, self._ghosts_of_frequent
        if key in recent:
            weight = max(1.0, frequent.nbytes / recent.nbytes)
            self.target += weight * (recent.take(key) or 0)
            self.target = min(self.target, float(self.capacity))
        elif key in frequent:
            weight = max(1.0, recent.nbytes / frequent.nbytes)
            self.target -= weight * (frequent.take(key) or 0)
            self.target = max(self.target, 0.0)
        else:
            return False
        return True

    def _trim(self) -> None:
        """`recent` and its ghosts together remember one capacity, everything together two."""
        self._ghosts_of_recent.trim(max(0, self.capacity - self._recent.nbytes))
        known = self._recent.nbytes + self._frequent.nbytes + self._ghosts_of_recent.nbytes
        self._ghosts_of_frequent.trim(max(0, 2 * self.capacity - known))
