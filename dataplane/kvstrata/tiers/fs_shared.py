"""The others that use the same store: what they did, who evicts, how much room is ours.

Once a second each writer tells its news and reads the others', says that it lives, and renews or
watches the lease. The evictor publishes how much is used and by how many the rest is shared, so
that together they stay within the bound: each adds at most its share until the evictor has
heard of it. A store of one node is the special case that has it all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstrata.keys import Key
from kvstrata.tiers.fs_lease import LeaseFile, Use
from kvstrata.tiers.fs_news import REMOVED, STORED, TOTAL, USED, News, Record
from kvstrata.tiers.fs_root import Root

__all__ = ["Exchange", "Shared"]

# Told at most; a mount that takes none for long loses the oldest, and walks make up for it.
_MOST_PENDING = 262_144
# Writers whose lock file's time stands still for so long don't count.
_SILENT = 30.0
_ALIVE_EVERY = 5.0


@dataclass(slots=True)
class Exchange:
    """What a round brought. `errors` are of the parts that failed; the others were done."""

    news: list[tuple[str, Record]] = field(default_factory=list)
    errors: list[OSError] = field(default_factory=list)


class Shared:
    """`exchange` blocks and runs in one thread at a time, the rest on the event loop."""

    def __init__(self, root: Root, clock: Callable[[], float], capacity: int | None) -> None:
        self.lease = LeaseFile(root, clock)
        self._root, self._clock, self._capacity = root, clock, capacity
        self._news = News(root)
        self._pending: list[Record] = []
        self._total = 0  # bytes this writer ever stored
        self._heard: dict[str, int] = {}
        self._writers: dict[str, tuple[float, float]] = {}  # file's time, and when it changed
        self._said_alive = float("-inf")

    @property
    def evicts(self) -> bool:
        """Whether this writer is the evictor."""
        return self.lease.held

    @property
    def writers(self) -> int:
        """How many share the store, this one included."""
        now = self._clock()
        return max(1, sum(now - changed <= _SILENT for _, changed in self._writers.values()))

    @property
    def used_before(self) -> int:
        """Bytes that were used when this writer came, as the lease of then says; -1: nobody
        knows."""
        predecessor = self.lease.predecessor
        return -1 if predecessor is None else predecessor.use.used_bytes

    def start(self) -> None:
        """Before the first walk. Raises `OSError`."""
        self._news.start()

    def stored(self, chunks: Iterable[tuple[Key, int]], began: float) -> None:
        """We stored them; `began` is before their files were there."""
        for key, disk_bytes in chunks:
            self._total += disk_bytes
            self._note(Record(STORED, key, disk_bytes, self._total, began))

    def removed(self, keys: Iterable[Key], ended: float) -> None:
        """We removed them; `ended` is after their files were gone."""
        for key in keys:
            self._note(Record(REMOVED, key, 0, self._total, ended))

    def used(self, accesses: Iterable[tuple[Key, int, float]]) -> None:
        """They were used here: key, bytes and when."""
        for key, disk_bytes, accessed in accesses:
            self._note(Record(USED, key, disk_bytes, self._total, accessed))

    def hear(self, writer: str, record: Record) -> None:
        self._heard[writer] = record.total

    def room(self, used: int, claimed: int) -> int | None:
        """Bytes that may be claimed now, when `used` are known to be used; None: no bound."""
        if self._capacity is None:
            return None
        free = self._capacity - used - claimed
        if self.evicts:
            return min(free, max(0, self._capacity - used) // self.writers - claimed)
        latest = self.lease.latest
        if latest is None:
            return free // self.writers
        use = latest.use
        bound = self._capacity if use.capacity is None else min(self._capacity, use.capacity)
        share = max(0, bound - use.used_bytes) // max(1, use.writers)
        return min(free, share - (self._total - self._heard_by(use)) - claimed)

    def use(self, used: int) -> Use:
        """What the evictor publishes."""
        heard = {w: total for w, total in self._heard.items() if w in self._writers}
        heard[self._root.writer] = self._total
        return Use(used, self._capacity, self.writers, heard)

    def take_pending(self) -> list[Record]:
        """What there is to tell, at least our total if the evictor lacks it."""
        pending, self._pending = self._pending[-_MOST_PENDING:], []
        latest = self.lease.latest
        if pending or self.evicts or latest is None:
            return pending
        heard = self._heard_by(latest.use) == self._total
        return [] if heard else [Record(TOTAL, Key(b""), 0, self._total, 0.0)]

    def put_back(self, pending: Sequence[Record]) -> None:
        """They could not be told."""
        self._pending = [*pending, *self._pending][-_MOST_PENDING:]

    def exchange(self, pending: Sequence[Record], use: Use, impatient: bool) -> Exchange:
        """One round. Raises `RootGone` or another `OSError` if there is no store to look at."""
        done = Exchange()
        self._root.check()
        if self._clock() - self._said_alive >= _ALIVE_EVERY or impatient:
            self._said_alive = self._clock()
            with self._errors(done):
                self._count_writers()
            with self._errors(done):
                self._root.say_alive()
        with self._errors(done):
            done.news = self._news.read()
        with self._errors(done):
            self.lease.step(use, impatient)
        with self._errors(done):
            self._news.write(pending)
        return done

    def tidy(self) -> None:
        """Remove what writers left that are gone. After a walk. Raises `OSError`."""
        self._root.sweep_writers()
        self._news.sweep(list(self._root.writers()))

    def forget(self) -> None:
        """The store was made anew, empty."""
        self._pending.clear()
        self._heard.clear()
        self._writers.clear()
        self._news = News(self._root)
        self.lease.forget()

    def _note(self, record: Record) -> None:
        self._pending.append(record)
        if len(self._pending) >= 2 * _MOST_PENDING:
            del self._pending[:_MOST_PENDING]

    def _heard_by(self, use: Use) -> int:
        return use.heard.get(self._root.writer, 0)

    def _count_writers(self) -> None:
        now, before = self._clock(), self._writers
        there = {}
        for writer, time in self._root.writers().items():
            known = before.get(writer)
            if known is not None:
                there[writer] = known if known[0] == time else (time, now)
            elif not self._root.dead(writer):
                there[writer] = (time, now)
        self._writers = there

    @contextlib.contextmanager
    def _errors(self, done: Exchange) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            done.errors.append(e)
