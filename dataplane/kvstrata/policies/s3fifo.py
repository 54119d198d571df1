"""Three queues, first in first out: a scan passes through the small one and is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstrata.keys import Key
from kvstrata.policies.base import Policy
from kvstrata.policies.sized import Sized

__all__ = ["S3Fifo"]

# Of the capacity, as the paper has it: enough to see whether a chunk is asked for again.
_SMALL = 0.1
_MOST_USES = 3


class S3Fifo(Policy):
    """S3-FIFO (Yang et al., SOSP 2023), counted in bytes.

    A new chunk enters `small`, and `main` only if it is used while there, or if it comes back
    soon after it was given up (`ghosts` remembers names). So `main` admits no chunk of a scan. A
    chunk of `main` that was used goes round again, up to three times.

    A walk along the victims turns no queue: the host tier may skip some. `evict` does, by what
    the last walk passed over.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small = Sized()
        self._main = Sized()
        self._ghosts = Sized()
        self._uses: dict[Key, int] = {}
        self._passed: tuple[list[Key], list[Key]] = [], []

    def insert(self, keys: Sequence[Key], nbytes: int, after: Sequence[Key] = ()) -> None:
        uses, ghosts = self._uses, self._ghosts
        new: list[Key] = []
        for key in reversed(keys):
            if key in uses:
                uses[key] = min(uses[key] + 1, _MOST_USES)
                continue
            uses[key] = 0
            if key in ghosts:
                ghosts.take(key)
                self._main.put(key, nbytes)
            else:
                new.append(key)
        self._small.put_all(new, nbytes)

    def touch(self, keys: Sequence[Key]) -> None:
        uses = self._uses
        for key in keys:
            count = uses.get(key, _MOST_USES)
            if count < _MOST_USES:
                uses[key] = count + 1

    def remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if self._uses.pop(key, None) is not None and self._small.take(key) is None:
                self._main.take(key)

    def evict(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        for key in keys:
            self._uses.pop(key, None)
        self._main.move(self._small.move(keys, self._ghosts), self._ghosts)
        # As much as `main` may hold.
        self._ghosts.trim(self.capacity * (1 - _SMALL))
        self._turn()

    def victims(self) -> Iterator[Key]:
        uses = self._uses
        small_passed, main_passed = self._passed = [], []
        small, left = iter(self._small.items()), self._small.nbytes
        most = self.capacity * _SMALL
        if left > most:
            for key, nbytes in small:
                if uses[key]:
                    small_passed.append(key)
                else:
                    yield key
                left -= nbytes
                if left <= most:
                    break
        for key in self._main:
            if uses[key]:
                main_passed.append(key)
            else:
                yield key
        for key, _ in small:
            if uses[key]:
                small_passed.append(key)
            else:
                yield key
        # All others are used. Those of `small` would enter `main` with no use left.
        yield from small_passed
        yield from sorted(main_passed, key=uses.__getitem__)

    def _turn(self) -> None:
        """What the last walk passed over goes into `main`, or round in it."""
        uses, main = self._uses, self._main
        small_passed, main_passed = self._passed
        self._passed = [], []
        promoted = [key for key in small_passed if key in uses]
        uses.update(dict.fromkeys(promoted, 0))
        self._small.move(promoted, main)
        for key in main_passed:
            if key in main and uses[key]:
                uses[key] -= 1
                main.move_to_end(key)
