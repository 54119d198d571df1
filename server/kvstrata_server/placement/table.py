"""A hash table of chunks that is all numbers: key -> slot, and what a slot knows of its chunk.

    slots     32-bit numbers, by where a key hashes to; 0 is empty, n + 1 is slot n
    families, words                          the key in slot n
    holders                                  number of the set of locations that hold it

A chunk costs 40 bytes and its share of `slots`, 12 to 24 bytes, and there is nothing for the
garbage collector to walk. Slots are numbered from 0 on and used again. An entry of a slot that
was freed or went to another key is left behind and matches nothing; when a third of the table is
used up a new one is begun, and each later insertion carries a part of the old one over, so that no
single call waits for all of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstrata_server.placement.batches import DEAD, Families, KeyBatch, Numbers, Words

__all__ = ["NOBODY", "ChunkTable", "Slots", "distinct"]

Slots = npt.NDArray[np.int64]

NOBODY = 0
"""The empty set of locations."""

_SMALLEST = 1 << 12
_CARRIED = 1 << 12
# Rows are added so many at a time: large arrays grow in place (mremap), but are zeroed.
_MOST_GROWTH = 1 << 18


class ChunkTable:
    """Keys and their slots. Calls take batches; a batch may have a key more than once."""

    def __init__(self, families: Families) -> None:
        self._of = families
        self._families: Numbers = np.zeros(_SMALLEST, np.uint32)
        self._words: Words = np.zeros((_SMALLEST, 4), np.uint64)
        self._holders: Numbers = np.zeros(_SMALLEST, np.uint32)
        self._end = 0  # slots from here on were never used
        self._free: list[Slots] = []
        self._slots = np.zeros(2 * _SMALLEST, np.uint32)
        self._used = 0  # entries of `_slots`, those left behind included
        self._old: Numbers | None = None
        self._carried = 0  # entries of `_old` that are in `_slots`, too
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def holders(self, slots: Slots) -> Numbers:
        return self._holders[slots]

    def all_holders(self) -> Numbers:
        return self._holders[: self._end]

    def set_holders(self, slots: Slots, holders: Numbers) -> None:
        self._holders[slots] = holders

    def live(self, slots: Slots) -> Slots:
        """Those that have a key."""
        known: Slots = slots[slots < self._end]
        live: Slots = known[self._families[known] != DEAD]
        return live

    def families(self, slots: Slots | Numbers) -> Numbers:
        return self._families[slots]

    def key_parts(self, slots: Slots) -> tuple[Numbers, Words]:
        return self._families[slots], self._words[slots]

    def hashes(self, slots: Slots) -> Words:
        return self._of.hashes(*self.key_parts(slots))

    def find(self, batch: KeyBatch) -> Slots:
        """Slot per key, -1 where there is none."""
        found = self._find_in(self._slots, batch)
        if self._old is not None:
            missing = np.flatnonzero(found < 0)
            if len(missing):
                found[missing] = self._find_in(self._old, _some(batch, missing))
        return found

    def assign(self, batch: KeyBatch) -> tuple[Slots, Slots]:
        """Slot per key, made where there was none; and those made, ascending, each once."""
        found = self.find(batch)
        missing = np.flatnonzero(found < 0)
        if not len(missing):
            return found, missing
        absent = _some(batch, missing)
        self._make_room(len(missing))
        fresh = self._take_slots(len(missing))
        self._families[fresh] = absent.families
        self._words[fresh] = absent.words
        self._holders[fresh] = NOBODY
        settled = self._insert(absent, fresh)
        found[missing] = settled
        twice = fresh[settled != fresh]
        if len(twice):  # a key that the batch has more than once
            self._families[twice] = DEAD
            self._free.append(twice)
            fresh = fresh[settled == fresh]
        self._count += len(fresh)
        return found, np.sort(fresh)

    def put_at(self, slots: Slots, batch: KeyBatch) -> None:
        """At start: keys that are not there yet, into slots that were never used."""
        self._grow(int(slots.max()) + 1)
        self._make_room(len(slots))
        self._families[slots] = batch.families
        self._words[slots] = batch.words
        self._insert(batch, slots)
        self._count += len(slots)

    def reclaim(self) -> None:
        """After `put_at`: slots below the highest one that no key is in may be used."""
        unused = np.flatnonzero(self._families[: self._end] == DEAD)
        self._free = [unused] if len(unused) else []

    def free(self, slots: Slots) -> None:
        """Distinct slots; their keys are gone."""
        if len(slots):
            self._families[slots] = DEAD
            self._holders[slots] = NOBODY
            self._free.append(np.sort(slots))
            self._count -= len(slots)

    # ------------------------------------------------------------ inside

    def _find_in(self, entries: Numbers, batch: KeyBatch) -> Slots:
        mask = np.uint64(len(entries) - 1)
        found = np.full(len(batch), -1, np.int64)
        left = np.arange(len(batch))
        at = (batch.hashes & mask).astype(np.int64)
        while len(left):
            slots = entries[at].astype(np.int64) - 1
            there = np.flatnonzero(slots >= 0)  # the others met an empty entry
            left, at, slots = left[there], at[there], slots[there]
            same = (self._families.take(slots) == batch.families.take(left)) & _equal(
                self._words.take(slots, axis=0), batch.words.take(left, axis=0)
            )
            found[left[same]] = slots[same]
            on = np.flatnonzero(~same)
            left, at = left[on], (at[on] + 1) & int(mask)
        return found

    def _insert(self, batch: KeyBatch, slots: Slots) -> Slots:
        """Enter keys that are not in the old table. Returns the slot that each ended with."""
        entries = self._slots
        mask = np.uint64(len(entries) - 1)
        settled = slots.copy()
        left = np.arange(len(slots))
        at = (batch.hashes & mask).astype(np.int64)
        while len(left):
            empty = np.flatnonzero(entries[at] == 0)
            # Of several that want one entry the last gets it, and the others see it there.
            entries[at[empty]] = slots[left[empty]] + 1
            there = entries[at].astype(np.int64) - 1
            won = there == slots[left]
            self._used += int(np.count_nonzero(won[empty]))
            same = won | (
                (self._families[there] == batch.families[left])
                & (self._words[there] == batch.words[left]).all(axis=1)
            )
            settled[left[same]] = there[same]
            on = np.flatnonzero(~same)
            left, at = left[on], (at[on] + 1) & int(mask)
        return settled

    def _take_slots(self, count: int) -> Slots:
        taken: list[Slots] = []
        while self._free and count:
            some = self._free.pop()
            if len(some) > count:
                self._free.append(some[count:])
                some = some[:count]
            taken.append(some)
            count -= len(some)
        if count:
            start = self._end
            self._grow(start + count)
            taken.append(np.arange(start, start + count))
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def _grow(self, end: int) -> None:
        """Have rows for slots below `end`."""
        rows = len(self._families)
        while rows < end:
            rows += min(rows, _MOST_GROWTH)
        if rows > len(self._families):
            # No view of them outlives a call, which is what `refcheck` is about.
            self._families.resize(rows, refcheck=False)
            self._words.resize((rows, 4), refcheck=False)
            self._holders.resize(rows, refcheck=False)
        self._end = max(self._end, end)

    def _make_room(self, count: int) -> None:
        """Before `count` keys are inserted."""
        if self._old is None and 3 * (self._used + count) > len(self._slots):
            size = len(self._slots)
            while size < 6 * (self._count + count):
                size *= 2
            self._old, self._carried = self._slots, 0
            self._slots, self._used = np.zeros(size, np.uint32), 0
        if self._old is not None:
            self._carry(max(_CARRIED, 4 * count))

    def _carry(self, entries: int) -> None:
        old = self._old
        if old is None:
            return
        part = old[self._carried : self._carried + entries]
        slots = distinct(part[part > 0].astype(np.int64) - 1)
        slots = slots[self._families[slots] != DEAD]
        families, words = self.key_parts(slots)
        self._insert(KeyBatch(families, words, self._of.hashes(families, words)), slots)
        self._carried += len(part)
        if self._carried >= len(old):
            self._old = None


def distinct(slots: Slots) -> Slots:
    """Each once, ascending. Several times as fast as `np.unique`, which hashes."""
    ordered = np.sort(slots)
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def _equal(one: Words, other: Words) -> npt.NDArray[np.bool_]:
    """Which rows are. Four truth values at a time: `all(axis=1)` takes seven times as long, and
    `take`, above, a tenth of the time of an index."""
    equal: npt.NDArray[np.bool_] = (one == other).view(np.uint32)[:, 0] == 0x01010101
    return equal


def _some(batch: KeyBatch, which: Slots) -> KeyBatch:
    return KeyBatch(batch.families[which], batch.words[which], batch.hashes[which])
