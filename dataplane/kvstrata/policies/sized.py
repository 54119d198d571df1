"""Keys in order, counted in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvstrata.keys import Key

__all__ = ["Sized"]


class Sized(OrderedDict[Key, int]):
    """Keys, oldest first, with the bytes of each; `nbytes` is their sum. Changed by the methods
    here only: the others of a dict don't keep the sum."""

    nbytes = 0

    def put(self, key: Key, nbytes: int) -> None:
        """A key that isn't here becomes the youngest."""
        self[key] = nbytes
        self.nbytes += nbytes

    def put_all(self, keys: Sequence[Key], nbytes: int) -> None:
        """Keys that aren't here become the youngest, the last of them the very youngest."""
        before = len(self)
        self.update(dict.fromkeys(keys, nbytes))
        self.nbytes += nbytes * (len(self) - before)

    def take(self, key: Key) -> int | None:
        """Remove a key; its bytes, or None if it isn't here."""
        nbytes = self.pop(key, None)
        if nbytes is not None:
            self.nbytes -= nbytes
        return nbytes

    def move(self, keys: Sequence[Key], to: Sized) -> list[Key]:
        """Those of the keys that are here become the youngest of `to`; the others."""
        others = []
        moved = 0
        for key in keys:
            nbytes = self.pop(key, None)
            if nbytes is None:
                others.append(key)
            else:
                to[key] = nbytes
                moved += nbytes
        self.nbytes -= moved
        to.nbytes += moved
        return others

    def trim(self, most: float) -> None:
        """Remove the oldest until at most `most` bytes are left."""
        nbytes = self.nbytes
        while nbytes > most:
            nbytes -= self.popitem(last=False)[1]
        self.nbytes = nbytes
