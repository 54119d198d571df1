"""Who holds which chunk: the in-process index that lookups are served from.

A location is what one node reported about its host memory or about one store. Per chunk the
index keeps the number of the set of locations that hold it; few different sets exist, each is
kept once, and a lookup of a prefix falls into runs of one set each. Per location it keeps a
bitmap of the chunks there. Ten million placements take about 0.7 GB, and no objects.

What changes is returned as `Added` and `Removed`, with everything that SQL needs: chunks have
numbers there (`ids`), by which placements name them.

It knows nothing of time, SQL or HTTP. All calls are synchronous and work on batches.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Collection, Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from kvstrata.keys import Key
from kvstrata_server.placement.batches import DEAD, Families, KeyBatch, KeyRows, Numbers, Words
from kvstrata_server.placement.held import Gathering, Held, Reach, Tallied, tally
from kvstrata_server.placement.table import NOBODY, ChunkTable, Slots, distinct

__all__ = [
    "HOST",
    "Added",
    "ChunkIds",
    "Holders",
    "LocationId",
    "PlacementIndex",
    "Reach",
    "Removed",
    "Tallied",
]

HOST = "host"
# Bitmaps united at a time.
_UNITED = 32
# Keys looked for at a time, and locations of different sets looked at.
_FOUND = 1 << 14
_MOST_HOLDERS = 1 << 14

LocationId = int
Holders = tuple[LocationId, ...]
"""Locations, ascending."""

ChunkIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """Chunks that are now at `location`, and those of them that SQL has no row for (`chunks`;
    positions are into `chunk_ids`)."""

    location: LocationId
    ids: ChunkIds
    chunk_ids: ChunkIds
    chunks: Sequence[KeyRows]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """Chunks that are no longer at `location`."""

    location: LocationId
    ids: ChunkIds

    def __len__(self) -> int:
        return len(self.ids)


class PlacementIndex:
    """Chunk -> the locations that hold it, and location -> its chunks.

    `shared_ids`: chunks are numbered in SQL by their hash, which several servers agree on
    without asking each other, instead of by their slot here, which lets SQLite append.
    """

    def __init__(self, shared_ids: bool = False) -> None:
        self.families = Families()
        self._table = ChunkTable(self.families)
        self._sets = _Sets()
        self._at: dict[LocationId, BitMap] = {}
        self._revisions: dict[LocationId, int] = {}
        self._placements = 0
        self._shared_ids = shared_ids

    def __len__(self) -> int:
        """Chunks held anywhere."""
        return len(self._table)

    @property
    def placements(self) -> int:
        """(chunk, location) pairs."""
        return self._placements

    # ------------------------------------------------------------ to read

    def holders(self, keys: KeyBatch | Sequence[Key]) -> list[Holders]:
        """The locations of each key; whether their nodes are up is another matter."""
        return [self._sets[n] for n in self._numbers(keys).tolist()]

    def tally(self, keys: KeyBatch | Sequence[Key], reach: Reach) -> dict[str, Tallied]:
        """Per node that `reach` names and that can serve any of `keys`, how many.

        A prefix is counted over any mix of a node's tiers, and per tier by itself.
        """
        return tally(self.held(keys, reach))

    def held(self, keys: KeyBatch | Sequence[Key], reach: Reach) -> Held:
        """Per key who can serve it, of the nodes that `reach` names."""
        finding = self.finding(keys, reach)
        while True:
            try:
                next(finding)
            except StopIteration as found:
                held: Held = found.value
                return held

    def finding(self, keys: KeyBatch | Sequence[Key], reach: Reach) -> Generator[None, None, Held]:
        """`held` in steps of some milliseconds, between which anything may happen; who has left
        meanwhile serves nothing more."""
        batch = self._batch(keys, intern=False)
        gathering = Gathering(reach)
        parts = []
        for start in range(0, len(batch), _FOUND):
            if len(batch) > _FOUND:
                yield
            numbers = self._numbers(batch.part(slice(start, start + _FOUND)))
            begins = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()]
            runs = numbers[begins].tolist()
            rows = {}
            effort = 0
            # Numbers may mean other sets after each step.
            for number, holders in [(number, self._sets[number]) for number in {*runs}]:
                effort += len(holders)
                if effort > _MOST_HOLDERS:
                    yield
                    effort = 0
                rows[number] = gathering.row(holders)
            if len(runs) == 1:  # as most have it
                parts.append(np.full(len(numbers), rows[runs[0]]))
            else:
                lengths = np.diff([*begins, len(numbers)])
                parts.append(np.repeat([rows[number] for number in runs], lengths))
        if len(parts) == 1:
            return gathering.held(parts[0])
        return gathering.held(np.concatenate(parts) if parts else np.empty(0, np.int64))

    def count_at(self, location: LocationId) -> int:
        return len(self._at.get(location, ()))

    def revision(self, location: LocationId) -> int:
        """Another one whenever something else is there than before."""
        return self._revisions.get(location, 0)

    def families_at(
        self, locations: Collection[LocationId], size: int = 100_000
    ) -> Iterator[Numbers]:
        """Families of the chunks that are at any of these locations when this is called, each
        chunk once, in parts of a millisecond or less. What leaves meanwhile may lack; a slot that
        went to another chunk meanwhile counts as that one."""
        at = [self._at[each] for each in locations if each in self._at]
        here = at[0].copy() if len(at) == 1 else BitMap()
        for start in range(0, len(at) if len(at) > 1 else 0, _UNITED):
            here = BitMap.union(here, *at[start : start + _UNITED])
            yield np.empty(0, np.uint32)
        for start in range(0, len(here), size):
            part = here[start : start + size]
            families = self._table.families(np.frombuffer(part.to_array(), np.uint32))
            yield families[families != DEAD]

    def select(
        self,
        locations: Collection[LocationId],
        wanted: Callable[[Holders], bool],
        size: int = 10_000,
    ) -> Iterator[tuple[Numbers, Words]]:
        """The chunks at any of these locations of which `wanted` accepts all that hold them: their
        families and hashes (`Families.keys` makes keys of them), in parts of about a millisecond.
        What changes meanwhile may lack, or be as it was."""
        here = BitMap.union(BitMap(), *(self._at[each] for each in locations if each in self._at))
        verdicts: dict[Holders, bool] = {(): False}
        for start in range(0, len(here), size):
            slots = _slots(here[start : start + size])
            numbers = self._table.holders(slots)
            different, inverse = np.unique(numbers, return_inverse=True)
            chosen = []
            for number in different.tolist():
                held = self._sets[number]
                if held not in verdicts:
                    verdicts[held] = wanted(held)
                chosen.append(verdicts[held])
            yield self._table.key_parts(slots[np.array(chosen, bool)[inverse]])

    def keys_at(self, location: LocationId) -> list[Key]:
        """In no order that means anything."""
        return [key for part in self.dump_of(location) for key in part]

    def dump_of(self, location: LocationId, size: int = 10_000) -> Iterator[list[Key]]:
        """What is at a location when this is called, in parts; what leaves meanwhile may lack."""
        slots = _slots(self._at.get(location, BitMap()))
        for start in range(0, len(slots), size):
            part = slots[start : start + size]
            part = part[self._holds(part, location)]
            yield self.families.keys(*self._table.key_parts(part))

    def dump(self, size: int = 10_000) -> Iterator[tuple[LocationId, list[Key]]]:
        """All placements, in parts of one location each."""
        for location in list(self._at):
            for part in self.dump_of(location, size):
                yield location, part

    def batch_at(self, location: LocationId) -> KeyBatch:
        families, words = self._table.key_parts(_slots(self._at.get(location, BitMap())))
        return KeyBatch(families, words, self.families.hashes(families, words))

    # ------------------------------------------------------------ to change

    def add(self, location: LocationId, keys: KeyBatch | Sequence[Key]) -> Added:
        """Returns those that were not there yet."""
        slots, fresh = self._table.assign(self._batch(keys))
        return self._added(location, distinct(slots), fresh)

    def remove(self, location: LocationId, keys: KeyBatch | Sequence[Key]) -> Removed:
        """Returns those that were there."""
        slots = self._table.find(self._batch(keys, intern=False))
        return self._removed(location, distinct(slots[slots >= 0]))

    def remove_everywhere(
        self, locations: Container[LocationId], keys: KeyBatch | Sequence[Key]
    ) -> list[Removed]:
        """From all these, of which few may hold any: returns the changes of those that did."""
        found = self._table.find(self._batch(keys, intern=False))
        slots = distinct(found[found >= 0])
        sets = np.unique(self._table.holders(slots)).tolist()
        holding = {each for n in sets for each in self._sets[n] if each in locations}
        removed = []
        for location in sorted(holding):
            removed.append(self._removed(location, slots))
            slots = self._table.live(slots)
        return removed

    def replace(
        self, location: LocationId, keys: KeyBatch | Sequence[Key]
    ) -> tuple[Added, Removed]:
        """Make `keys` all that is there. To be written in this order: numbers are used again."""
        slots, fresh = self._table.assign(self._batch(keys))
        wanted = _bitmap(distinct(slots))
        before = self._at.get(location, BitMap())
        added = self._added(location, _slots(wanted - before), fresh)
        return added, self._removed(location, _slots(before - wanted))

    def clear(self, location: LocationId) -> Removed:
        """Forget all that is there. Returns it."""
        removed = self._removed(location, _slots(self._at.get(location, BitMap())))
        self._at.pop(location, None)
        return removed

    # ------------------------------------------------------------ to load from SQL

    def load_chunks(self, ids: ChunkIds, keys: KeyBatch) -> None:
        """Rows of chunks that placements name, each once."""
        if len(ids):
            self._table.put_at(ids, keys)

    def load_placements(self, location: LocationId, ids: ChunkIds) -> None:
        """After the chunks. What has no row of its own is left out."""
        self._enter(location, self._table.live(distinct(ids)))

    def loaded(self) -> None:
        """That was all: numbers in between may be used."""
        self._table.reclaim()

    # ------------------------------------------------------------ inside

    def _batch(self, keys: KeyBatch | Sequence[Key], intern: bool = True) -> KeyBatch:
        return keys if isinstance(keys, KeyBatch) else self.families.of_keys(keys, intern)

    def _numbers(self, keys: KeyBatch | Sequence[Key]) -> Numbers:
        """Number of the set of holders, per key."""
        slots = self._table.find(self._batch(keys, intern=False))
        numbers = self._table.holders(np.maximum(slots, 0))
        numbers[slots < 0] = NOBODY
        return numbers

    def _holds(self, slots: Slots, location: LocationId) -> npt.NDArray[np.bool_]:
        different, inverse = np.unique(self._table.holders(slots), return_inverse=True)
        held = [location in self._sets[n] for n in different.tolist()]
        return np.array(held, bool)[inverse]

    def _ids(self, slots: Slots) -> ChunkIds:
        if not self._shared_ids:
            return slots
        return (self._table.hashes(slots) >> np.uint64(1)).astype(np.int64)

    def _added(self, location: LocationId, slots: Slots, fresh: Slots) -> Added:
        new = self._enter(location, slots)
        if self._shared_ids:
            fresh = new  # another server may just have dropped the row of a chunk known here
        chunks = tuple(self.families.rows(*self._table.key_parts(fresh)))
        return Added(location, self._ids(new), self._ids(fresh), chunks)

    def _enter(self, location: LocationId, slots: Slots) -> Slots:
        """`slots` are distinct. Returns those that were not there yet."""
        before = self._table.holders(slots)
        after = self._moved(before, self._sets.with_(location))
        new: Slots = slots[after != before]
        if len(new):
            self._table.set_holders(new, after[after != before])
            at = self._at.get(location)
            if at is None:
                self._at[location] = _bitmap(new)
            else:
                at |= _bitmap(new)
            self._placements += len(new)
            self._revisions[location] = self.revision(location) + 1
            self._sets.sweep(self._table)
        return new

    def _removed(self, location: LocationId, slots: Slots) -> Removed:
        """`slots` are distinct."""
        before = self._table.holders(slots)
        after = self._moved(before, self._sets.without(location))
        old = slots[after != before]
        after = after[after != before]
        removed = Removed(location, self._ids(old))
        if len(old):
            self._at[location] -= _bitmap(old)
            self._placements -= len(old)
            self._revisions[location] = self.revision(location) + 1
            self._table.set_holders(old, after)
            self._table.free(old[after == NOBODY])
            self._sets.sweep(self._table)
        return removed

    @staticmethod
    def _moved(before: Numbers, change: _Change) -> Numbers:
        # Within a batch most chunks go from one set to the same other one.
        if len(before) and (before == before[0]).all():
            return np.full(len(before), change(int(before[0])), np.uint32)
        different, inverse = np.unique(before, return_inverse=True)
        return np.array([change(n) for n in different.tolist()], np.uint32)[inverse]


class _Change(Protocol):
    def __call__(self, number: int, /) -> int: ...


class _Sets:
    """Sets of locations and their numbers. Tuples of numbers: nothing for the collector."""

    def __init__(self) -> None:
        self._sets: list[Holders | None] = [()]
        self._numbers: dict[Holders, int] = {(): NOBODY}
        self._free: list[int] = []
        self._limit = 1024

    def __getitem__(self, number: int) -> Holders:
        return self._sets[number] or ()

    def __len__(self) -> int:
        return len(self._numbers)

    def with_(self, location: LocationId) -> _Change:
        def change(number: int) -> int:
            holders = self[number]
            if location in holders:
                return number
            return self._number(tuple(sorted((*holders, location))))

        return change

    def without(self, location: LocationId) -> _Change:
        def change(number: int) -> int:
            holders = self[number]
            if location not in holders:
                return number
            return self._number(tuple(each for each in holders if each != location))

        return change

    def _number(self, holders: Holders) -> int:
        number = self._numbers.get(holders)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._sets[number] = holders
            else:
                number = len(self._sets)
                self._sets.append(holders)
            self._numbers[holders] = number
        return number

    def sweep(self, table: ChunkTable) -> None:
        """Sets nobody uses any more pile up as chunks and nodes come and go."""
        if len(self._numbers) <= self._limit:
            return
        used = np.zeros(len(self._sets), bool)
        used[table.all_holders()] = True
        used[NOBODY] = True
        for number in np.flatnonzero(~used).tolist():
            holders = self._sets[number]
            if holders is not None:
                self._sets[number] = None
                del self._numbers[holders]
                self._free.append(number)
        self._limit = max(1024, 2 * len(self._numbers))


def _bitmap(slots: Slots) -> BitMap:
    return BitMap(array.array("I", slots.astype(np.uint32).tobytes()))


def _slots(bitmap: BitMap) -> Slots:
    return np.frombuffer(bitmap.to_array(), np.uint32).astype(np.int64)
