"""What a tier dropped while calls run that may have seen it before.

A request for a chunk and the removal of that chunk cross: each is answered in some order of its
own. So a call remembers when it began, and what it has seen of a chunk that was dropped since is
doubtful: somebody has to look again before it is believed, or acknowledged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvstrata.keys import Key
from kvstrata.tiers.calls import Calls

__all__ = ["Drops"]

# At a chunk that is removed again and again while it is stored.
_LOOKS = 4
# Remembered, of a tier whose calls never all end; then everything counts as crossed once.
_MOST = 65_536


class Drops:
    """Of one tier, on its event loop."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._last: dict[Key, int] = {}
        self._held: dict[Key, int] = {}
        self._all = self._all_held = self._count = 0

    def note(self, key: Key) -> None:
        """It is not there any more, as far as we know."""
        self._count += 1
        self._last[key] = self._count
        if len(self._last) > _MOST:
            self._last.clear()
            self._all = self._count

    def note_all(self) -> None:
        """Nothing is, not even what only calls under way have seen."""
        self._count += 1
        self._all = self._count

    def note_held(self, key: Key) -> None:
        """It has come to be there."""
        self._count += 1
        self._held[key] = self._count
        if len(self._held) > _MOST:
            self._held.clear()
            self._all_held = self._count

    def mark(self) -> int:
        """A moment, for `since`: when a call begins."""
        if self._calls.running_alone():
            self._last.clear()  # nobody has an older one
            self._held.clear()
        return self._count

    def since(self, key: Key, mark: int) -> bool:
        """Whether what a call saw of a key since may be gone again."""
        return max(self._last.get(key, 0), self._all) > mark

    def held_since(self, key: Key, mark: int) -> bool:
        """Whether it may have come after a call looked for it in vain."""
        return max(self._held.get(key, 0), self._all_held) > mark

    async def gone(
        self,
        keys: Sequence[Key],
        mark: int,
        there: Callable[[list[Key]], Awaitable[Sequence[bool]]],
    ) -> set[Key]:
        """Which of the keys that a call has seen since `mark` are gone again, or may be; `there`
        has a look at those in doubt. To be acted upon at once, before anything is awaited."""
        gone: set[Key] = set()
        seen = dict.fromkeys(keys, mark)
        for _ in range(_LOOKS):
            # Of all of them: while some were looked for, others may have gone.
            doubtful = [key for key in keys if key not in gone and self.since(key, seen[key])]
            if not doubtful:
                return gone
            now = self.mark()
            for key, here in zip(doubtful, await there(doubtful), strict=True):
                if here:
                    seen[key] = now
                else:
                    gone.add(key)
        return gone.union(key for key in keys if self.since(key, seen[key]))
