"""Three queues, first in first out: a scan passes through the small one and is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

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
        self._passed: list[Key] = []

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
            self._take(key)

    def evict(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        take, put = self._take, self._ghosts.put
        for key in keys:
            nbytes = take(key)
            if nbytes is not None:
                put(key, nbytes)
        # As much as `main` may hold.
        self._ghosts.trim(self.capacity * (1 - _SMALL))
        uses, small, main = self._uses, self._small, self._main
        for key in self._passed:
            if (nbytes := small.take(key)) is not None:
                uses[key] = 0
                main.put(key, nbytes)
            elif key in main:
                uses[key] -= 1
                main.move_to_end(key)
        self._passed = []

    def victims(self) -> Iterator[Key]:
        uses = self._uses
        passed = self._passed = []
        small, left = iter(self._small.items()), self._small.nbytes
        most = self.capacity * _SMALL
        if left > most:
            for key, nbytes in small:
                if uses[key]:
                    passed.append(key)
                else:
                    yield key
                left -= nbytes
                if left <= most:
                    break
        for key in chain(self._main, (key for key, _ in small)):
            if uses[key]:
                passed.append(key)
            else:
                yield key
        # All are used: `small` goes into `main`, and that round until uses are used up.
        yield from sorted(passed, key=lambda key: 1 if key in self._small else uses[key])

    def _take(self, key: Key) -> int | None:
        if self._uses.pop(key, None) is None:
            return None
        nbytes = self._small.take(key)
        return self._main.take(key) if nbytes is None else nbytes
