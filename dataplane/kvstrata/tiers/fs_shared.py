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
from kvstrata.tiers.fs_lease import TTL, LeaseFile, Use
from kvstrata.tiers.fs_news import REMOVED, STORED, TOTAL, USED, News, Record
from kvstrata.tiers.fs_root import Root

__all__ = ["Exchange", "Shared"]

# Told at most; a mount that takes none for long loses the oldest, and walks make up for it.
_MOST_PENDING = 262_144
# Writers whose lock file's time stands still for so long don't count.
_SILENT = 30.0
_ALIVE_EVERY = 5.0
_COUNT_EVERY = 2.0


@dataclass(slots=True)
class Exchange:
    """What a round brought. `took_over`: the evictor before us died. `errors` are of the parts
    that failed; the others were done."""

    news: list[tuple[str, Record]] = field(default_factory=list)
    took_over: bool = False
    errors: list[OSError] = field(default_factory=list)


class Shared:
    """`exchange` blocks and runs in one thread at a time, the rest on the event loop."""

    def __init__(self, root: Root, clock: Callable[[], float], capacity: int | None) -> None:
        self.lease = LeaseFile(root, clock)
        self._root, self._clock, self._capacity = root, clock, capacity
        self._news = News(root)
        self._pending: list[Record] = []
        self._total = 0  # bytes this writer ever stored
        self._told = 0  # of those
        self._heard: dict[str, int] = {}
        self._writers: dict[str, tuple[float, float]] = {}  # file's time, and when it changed
        self._said_alive = self._counted = float("-inf")
        self._published: list[tuple[float, Use]] = []
        self.sure = True
        """Whether we know of all that is stored. An evictor that does not publishes no room."""
        self.lost = False
        """Whether a writer is gone that may not have told all."""

    @property
    def evicts(self) -> bool:
        """Whether this writer is the evictor."""
        return self.lease.held

    @property
    def alone(self) -> bool:
        """Whether nobody else is known to use the store."""
        return self._writers.keys() <= {self._root.writer}

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
            return free - self._promised()
        latest = self.lease.latest
        if latest is None:
            return free if self.alone else 0
        if self.lease.silent >= TTL:
            return 0  # who comes next counts on that
        if latest.use.capacity is None:
            return free
        return min(free, latest.use.limit(self._root.writer) - self._total - claimed)

    def use(self, used: int) -> Use:
        """What the evictor publishes. From now on the others may act on it."""
        heard = {writer: self._heard.get(writer, 0) for writer in self._writers}
        heard[self._root.writer] = self._total
        if not self.sure:
            used = self._capacity or used
        use = Use(used, self._capacity, heard)
        now = self._clock()
        self._published = [(at, u) for at, u in self._published if now - at < TTL]
        self._published.append((now, use))
        return use

    def _promised(self) -> int:
        """Bytes that the others may store, or have stored, of which we have not heard."""
        now = self._clock()
        uses = [use for at, use in self._published if now - at < TTL]
        before = self.lease.predecessor
        if before is not None and before.released and self.lease.taken < TTL:
            uses.append(before.use)
        most: dict[str, int] = {}
        for use in uses:
            for writer in use.heard:
                most[writer] = max(most.get(writer, 0), use.limit(writer))
        others = (most.keys() & self._writers.keys()) - {self._root.writer}
        return sum(max(0, most[w] - self._heard.get(w, 0)) for w in others)

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
        if self._clock() - self._counted >= _COUNT_EVERY or impatient:
            self._counted = self._clock()
            with self._errors(done):
                self._count_writers()
        if self._clock() - self._said_alive >= _ALIVE_EVERY:
            self._said_alive = self._clock()
            with self._errors(done):
                self._root.writers.say_alive()
        with self._errors(done):
            done.news = self._news.read()
        with self._errors(done):
            done.took_over = self.lease.step(use, impatient)
        with self._errors(done):
            self._news.write(pending)
            self._told = pending[-1].total if pending else self._told
        return done

    def tell_first(self, keys: Sequence[Key]) -> bool:
        """In a thread, before they are removed: so that nobody offers what is gone, should we
        die. Whether this writer may remove them as the evictor."""
        now = self._root.system.now()
        if not self.alone:
            with contextlib.suppress(OSError):  # a full disk is why we are here
                self._news.write([Record(REMOVED, key, 0, self._told, now) for key in keys])
        try:
            return self.lease.fenced()
        except OSError:
            return False

    def tidy(self) -> None:
        """Remove what writers left that are gone. After a walk. Raises `OSError`."""
        self._root.writers.sweep()
        self._news.sweep(list(self._root.writers.seen()))

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
        for writer, time in self._root.writers.seen().items():
            known = before.get(writer)
            if known is None or known[0] != time:
                if known is not None or not self._root.writers.dead(writer):
                    there[writer] = (time, now)
            elif now - known[1] <= _SILENT and not self._root.writers.dead(writer):
                there[writer] = known
            else:
                self.lost = True
        self._writers = there

    @contextlib.contextmanager
    def _errors(self, done: Exchange) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            done.errors.append(e)
