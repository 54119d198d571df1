"""What the fs tier knows to be on disk, in the order in which it would give it up.

Least recently used first, and what a chunk extends always after the chunk: whoever touches a
chunk touches its ancestors, so a chain loses its tail before its head. The time of each access
is kept in the file's own time, written back lazily and never for a chunk without its ancestors,
so that a walk over the directory finds age and order again.

Used on the event loop alone. Times are of the file system's clock, seconds since the epoch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from kvstrata.keys import Key

__all__ = ["SKEW", "Found", "Held", "Index"]

# Accesses of one moment still have an order, which a file's time can tell.
_TICK = 1e-6
# As `relatime` of mount: a file's time that is younger than this is good enough.
_FRESH = 60.0
SKEW = 60.0
"""Times further in the future than this, of a clock that was set, are not believed."""


class Held(NamedTuple):
    """A chunk that is on disk: bytes it really uses, and what it extends if known."""

    key: Key
    disk_bytes: int
    parent: Key | None = None


class Found(NamedTuple):
    """What a walk says of a file; `accessed` is its own time."""

    accessed: float
    key: Key
    disk_bytes: int


class _Chunk:
    __slots__ = ("accessed", "disk_bytes", "on_disk", "parent", "written")

    def __init__(self, disk_bytes: int, accessed: float, on_disk: float, parent: Key | None):
        self.disk_bytes = disk_bytes
        self.accessed = accessed
        self.written = accessed  # it was there after that
        self.on_disk = on_disk  # the file's time, as far as we know
        self.parent = parent


class Index:
    def __init__(self) -> None:
        self._chunks: OrderedDict[Key, _Chunk] = OrderedDict()
        self._dirty: dict[Key, None] = {}
        self._last = 0.0
        self.used = 0
        """Bytes of disk that the chunks use."""

    def __contains__(self, key: object) -> bool:
        return key in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Key]:
        """First to give up first."""
        return iter(self._chunks)

    def bytes_of(self, key: Key) -> int:
        """Of disk; 0 if it is not there."""
        chunk = self._chunks.get(key)
        return 0 if chunk is None else chunk.disk_bytes

    def accessed(self, key: Key) -> float | None:
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.accessed

    def written(self, key: Key) -> float:
        """A time after which its file was there; 0 if it is not known."""
        chunk = self._chunks.get(key)
        return 0.0 if chunk is None else chunk.written

    def hold(self, chunks: Sequence[Held], now: float, written: float | None = None) -> None:
        """They are on disk and were used; of a batch the first is the youngest, see
        `policies.Policy`. `written`: we wrote their files just now, after that time."""
        new = written is not None
        for key, disk_bytes, parent in chunks:
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = _Chunk(0, now, 0.0, None)
            self.used += disk_bytes - chunk.disk_bytes
            chunk.disk_bytes = disk_bytes
            if written is not None:
                chunk.on_disk, chunk.written = now, written
            if parent is not None:
                chunk.parent = parent
        self._touch([c.key for c in chunks], now, new)

    def touch(self, keys: Sequence[Key], now: float) -> None:
        """They were used. Unknown ones are ignored."""
        self._touch([key for key in keys if key in self._chunks], now, False)

    def learn(self, key: Key, disk_bytes: int, accessed: float) -> bool:
        """Somebody else stored it, or used it; whether it was unknown."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            chunk.on_disk = max(chunk.on_disk, accessed)
            chunk.written = max(chunk.written, accessed)
            if accessed > chunk.accessed:
                self._move(key, chunk, accessed)
            return False
        self._chunks[key] = _Chunk(disk_bytes, accessed, accessed, None)
        self._last = max(self._last, accessed)
        self.used += disk_bytes
        return True

    def recover(self, found: Sequence[Found]) -> list[Key]:
        """What a walk found and was not known; `order` follows when the walk is over."""
        new = []
        for accessed, key, disk_bytes in found:
            chunk = self._chunks.get(key)
            if chunk is None:
                self._chunks[key] = _Chunk(disk_bytes, accessed, accessed, None)
                self.used += disk_bytes
                new.append(key)
            else:
                self.used += disk_bytes - chunk.disk_bytes
                chunk.disk_bytes = disk_bytes
        return new

    def order(self, found: Sequence[Found]) -> None:
        """Put what a walk found in order of age, in slices: the youngest of all first. Chunks
        used since stay the younger ones."""
        for accessed, key, _ in found:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.accessed <= accessed:
                chunk.accessed = chunk.on_disk = accessed
                self._last = max(self._last, accessed)
                self._chunks.move_to_end(key, last=False)

    def drop(self, key: Key) -> bool:
        """Whether it was there."""
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return False
        self._dirty.pop(key, None)
        self.used -= chunk.disk_bytes
        return True

    def spare(self, key: Key) -> None:
        """What can't be removed must not be the first victim every time."""
        self._chunks.move_to_end(key)

    def oldest(self, nbytes: float, keep: Collection[Key] = ()) -> list[Key]:
        """First to give up first, until together they use `nbytes`."""
        victims = []
        for key, chunk in self._chunks.items():
            if nbytes <= 0:
                break
            if key not in keep:
                victims.append(key)
                nbytes -= chunk.disk_bytes
        return victims

    def expired(self, before: float, most: int) -> list[Key]:
        """Those not used since, at most so many."""
        keys: list[Key] = []
        for key, chunk in self._chunks.items():
            if chunk.accessed >= before or len(keys) == most:
                break
            keys.append(key)
        return keys

    def take_accesses(self, most: int) -> list[tuple[Key, float]]:
        """Times to write back to files, the oldest first."""
        keys = list(self._dirty)[:most]
        times = []
        for key in keys:
            del self._dirty[key]
            chunk = self._chunks[key]
            chunk.on_disk = chunk.accessed
            times.append((key, chunk.accessed))
        return sorted(times, key=lambda pair: pair[1])

    def _touch(self, keys: list[Key], now: float, new: bool) -> None:
        """Tail first, then head, then what they extend: the root of a chain is the youngest."""
        order: dict[Key, None] = {}
        for i in reversed(range(len(keys))):
            self._put_last(keys[i], order)
            if i == 0 or self._chunks[keys[i]].parent != keys[i - 1]:
                self._put_ancestors_last(keys[i], order)
        # A new file is younger than those of its ancestors.
        stale = new and len(order) > 1
        for key in order:
            chunk = self._chunks[key]
            stale = stale or now - chunk.on_disk > _FRESH
            self._move(key, chunk, max(now, self._last + _TICK))
        if stale:
            self._dirty.update(order)

    def _put_ancestors_last(self, key: Key, order: dict[Key, None]) -> None:
        seen = {key}  # an engine may have told nonsense, such as a circle
        up = self._chunks[key].parent
        while up is not None and up in self._chunks and up not in seen:
            seen.add(up)
            self._put_last(up, order)
            up = self._chunks[up].parent

    def _put_last(self, key: Key, order: dict[Key, None]) -> None:
        order.pop(key, None)
        order[key] = None

    def _move(self, key: Key, chunk: _Chunk, accessed: float) -> None:
        chunk.accessed = accessed
        self._last = max(self._last, accessed)
        self._chunks.move_to_end(key)
