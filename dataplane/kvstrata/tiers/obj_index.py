"""What an obj tier knows of its store: chunks, their bytes, and how old that knowledge is.

Order is by use, oldest first, and what a chunk extends is younger than itself: the head of a
chain is kept longest. The store is the truth and others change it, so knowledge ends: a chunk
that was there counts as there for `known_for` seconds, one that was not as missing for
`missing_for`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstrata.chains import Chains
from kvstrata.keys import Key
from kvstrata.tiers.base import Item
from kvstrata.tiers.drops import Drops

__all__ = ["Index", "Listed"]

_MOST_MISSING = 65_536


class Listed(NamedTuple):
    """A chunk as a listing shows it; `modified` in seconds since the epoch."""

    key: Key
    nbytes: int
    modified: float


@dataclass(slots=True)
class _Entry:
    nbytes: int
    seen: float
    listing: int  # the last that it was in, or that began before it was held
    used: bool = False


class Index:
    """Not thread-safe: it lives on the node's event loop."""

    def __init__(
        self,
        clock: Callable[[], float],
        known_for: float,
        missing_for: float,
        exclusive: bool,
        drops: Drops,
    ) -> None:
        self._clock = clock
        self._drops = drops
        self._known_for = known_for
        self._missing_for = missing_for
        self._exclusive = exclusive
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._missing: OrderedDict[Key, float] = OrderedDict()
        self._chains = Chains()
        self._listing = 0
        self._dropped: set[Key] | None = None  # since the listing under way began
        self.complete = False
        """Whether the store has been listed once."""
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def keys(self) -> list[Key]:
        return list(self._entries)

    def nbytes(self, key: Key) -> int:
        """Of a chunk that it holds, else 0."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.nbytes

    def there(self, key: Key) -> bool | None:
        """Whether the chunk is in the store; None: ask."""
        entry = self._entries.get(key)
        if entry is not None:
            return True if self._clock() < entry.seen + self._known_for else None
        missed = self._missing.get(key)
        if missed is not None and self._clock() < missed + self._missing_for:
            return False
        return False if self._exclusive and self.complete else None

    def learn(self, items: Iterable[Item]) -> None:
        """What extends what."""
        for item in items:
            if item.parent is not None:
                self._chains.learn([item.parent, item.key])
        self._chains.prune(self._entries, len(self._entries))

    def hold(self, chunks: Sequence[tuple[Key, int]]) -> None:
        """They are in the store, and in use: the first of them is the youngest now, and what
        they extend is younger still."""
        now = self._clock()
        for key, nbytes in reversed(chunks):
            entry = self._entries.get(key)
            self.used_bytes += nbytes - (entry.nbytes if entry else 0)
            self._entries[key] = _Entry(nbytes, now, self._listing, used=True)
            self._missing.pop(key, None)
        self.touch([key for key, _ in chunks])

    def touch(self, keys: Sequence[Key]) -> None:
        """They are in use; those that aren't held are passed over."""
        held = [key for key in keys if key in self._entries]
        for key in reversed(held):
            self._entries.move_to_end(key)
            self._entries[key].used = True
        for key in reversed(self._chains.extended(held, self._entries)):
            self._entries.move_to_end(key)

    def drop(self, key: Key, missing: bool = True) -> bool:
        """It is not in the store (or, without `missing`, nobody knows); whether it was held."""
        self._drops.note(key)
        if self._dropped is not None:
            self._dropped.add(key)
        if missing:
            self._missing[key] = self._clock()
            self._missing.move_to_end(key)
            if len(self._missing) > _MOST_MISSING:
                self._missing.popitem(last=False)
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.used_bytes -= entry.nbytes
        return True

    def clear(self) -> list[Key]:
        """Nobody knows of any chunk whether it is there; those that were held."""
        held = list(self._entries)
        self._drops.note_all()
        if self._dropped is not None:
            self._dropped.update(held)
        self._entries.clear()
        self._missing.clear()
        self.used_bytes = 0
        return held

    def forget(self, key: Key) -> None:
        """That it was missing: nobody knows any more."""
        self._missing.pop(key, None)

    def doubt(self, keys: Iterable[Key]) -> None:
        """What is held of these may be gone: it has to be asked for."""
        for key in keys:
            if key in self._entries:
                self._entries[key].seen = -math.inf

    def oldest(self, nbytes: float, keep: Collection[Key]) -> list[Key]:
        """The least used chunks, of at least that many bytes together, if there are enough."""
        victims = []
        for key, entry in self._entries.items():
            if nbytes <= 0:
                break
            if key not in keep:
                victims.append(key)
                nbytes -= entry.nbytes
        return victims

    # ------------------------------------------------------------ listing

    def begin_listing(self) -> None:
        """A listing begins; what is held or dropped from now on is newer than what it shows."""
        self._listing += 1
        self._dropped = set()

    def list_page(self, page: Sequence[Listed]) -> None:
        """Part of the listing: findable from now on, as the least used."""
        now = self._clock()
        for key, nbytes, _ in page:
            if self._dropped is None or key in self._dropped:
                continue
            entry = self._entries.get(key)
            if entry is None:
                self._entries[key] = _Entry(nbytes, now, self._listing)
                self._entries.move_to_end(key, last=False)
                self.used_bytes += nbytes
                self._missing.pop(key, None)
            elif entry.listing != self._listing:
                self.used_bytes += nbytes - entry.nbytes
                entry.nbytes, entry.seen, entry.listing = nbytes, now, self._listing

    def drop_unlisted(self, keys: Sequence[Key]) -> list[Key]:
        """At its end: drop those of the chunks that it lacked, and tell which."""
        gone = [
            key
            for key in keys
            if (entry := self._entries.get(key)) is not None and entry.listing != self._listing
        ]
        for key in gone:
            self.drop(key, missing=False)
        return gone

    def end_listing(self) -> None:
        """The listing is over, to its end or not."""
        self._dropped = None

    def unused(self, key: Key) -> bool:
        """Whether it is held, and was only ever listed."""
        entry = self._entries.get(key)
        return entry is not None and not entry.used

    def older(self, keys: Sequence[Key]) -> None:
        """Each of them is less used than the one before, and than all the rest."""
        for key in keys:
            if key in self._entries:
                self._entries.move_to_end(key, last=False)
