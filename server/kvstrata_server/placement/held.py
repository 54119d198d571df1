"""Who can serve some keys: what the index found, counted per node and per tier.

Of many keys few sets of holders differ, and of those few are served by different nodes: a store
that a thousand nodes share is one place to serve from, whoever of them reported a chunk. So what is
asked of each key is worked out for each such set.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Bools", "Gathering", "Held", "Reach", "Tallied", "tally"]

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Reach(Protocol):
    """Which nodes can serve what lies at a location, and as which tier: (node, tier) pairs. What
    it gives has to stay alive as long as itself."""

    def get(
        self, location: int, default: Sequence[tuple[str, str]], /
    ) -> Sequence[tuple[str, str]]: ...


@dataclass(frozen=True, eq=False)
class Held:
    """`places` are the tiers of nodes that can serve any of the keys, (node, tier), in order; each
    row of `sets` (m x places) is some of them, and `rows` (n int64) says per key who serves it."""

    places: Sequence[tuple[str, str]]
    sets: Bools
    rows: Ints

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def nodes(self) -> list[str]:
        return list(dict.fromkeys(node for node, _ in self.places))

    @cached_property
    def starts(self) -> Ints:
        """Per node the column of its first place; the others follow."""
        starts = [
            column
            for column, (node, _) in enumerate(self.places)
            if not column or self.places[column - 1][0] != node
        ]
        return np.array(starts, np.int64)

    def per_node(self, sets: Bools) -> Bools:
        """Of sets of places, in which of them each node is with any of its tiers."""
        if len(self.starts) in (0, len(self.places)):
            return sets
        per_node: Bools = np.logical_or.reduceat(sets, self.starts, axis=1)
        return per_node

    def first(self, rows: Ints) -> Ints:
        """Per set its first position among `rows`, and their number for one that isn't there."""
        first = np.full(len(self.sets), len(rows), np.int64)
        first[rows[::-1]] = np.arange(len(rows) - 1, -1, -1)  # of several the last one stays
        return first

    def gaps(self, rows: Ints, sets: Bools) -> Ints:
        """Per column of `sets` how many of `rows` come before the first that lacks it."""
        return _gaps(self.first(rows), len(rows), sets)


def _gaps(first: Ints, count: int, sets: Bools) -> Ints:
    """Per column of `sets` the least `first` of those that lack it, `count` if none does."""
    least: Ints = np.where(sets, count, first[:, None]).min(axis=0, initial=count)
    return least


class Gathering:
    """Makes `Held` of the sets of locations that hold keys, step by step."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._rows: dict[tuple[int, ...], int] = {}
        self._by_served: dict[frozenset[int], int] = {}
        self._numbers: dict[int, int] = {}
        self._served: list[Sequence[tuple[str, str]]] = []
        """What locations serve; most of a store serve the same."""
        self._members = array("q")
        """Numbers of those, of one row after another."""
        self._sizes: list[int] = []

    def row(self, holders: tuple[int, ...]) -> int:
        """The row of `Held.sets` for keys that are at these locations."""
        row = self._rows.get(holders)
        if row is None:
            numbers = {self._number(location) for location in holders}
            numbers.discard(-1)
            members = frozenset(numbers)
            row = self._by_served.get(members)
            if row is None:
                row = self._by_served[members] = len(self._sizes)
                self._members.extend(members)
                self._sizes.append(len(members))
            self._rows[holders] = row
        return row

    def _number(self, location: int) -> int:
        served = self._reach.get(location, ())
        if not served:
            return -1
        number = self._numbers.get(id(served))
        if number is None:
            number = self._numbers[id(served)] = len(self._served)
            self._served.append(served)
        return number

    def held(self, rows: Ints) -> Held:
        """`rows` as `row` gave them, per key."""
        places = sorted({place for served in self._served for place in served})
        columns = {place: column for column, place in enumerate(places)}
        sets = np.zeros((len(self._sizes), len(places)), bool)
        members = np.frombuffer(self._members, np.int64) if self._members else np.empty(0, np.int64)
        of_row = np.repeat(np.arange(len(self._sizes)), self._sizes)
        # Where each of them begins in `flat`, and where the next one.
        ends = np.cumsum([0, *map(len, self._served)])
        flat = np.array([columns[place] for served in self._served for place in served], np.int64)
        counts = (ends[1:] - ends[:-1])[members]
        at = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - ends[members], counts)
        sets[np.repeat(of_row, counts), flat[at]] = True
        return Held(places, sets, rows)


@dataclass(slots=True)
class Tallied:
    """What one node can serve of the keys asked: in all, from the first key on, per tier."""

    found: int = 0
    prefix: int = 0
    tiers: dict[str, list[int]] = field(default_factory=dict)
    """tier -> [found, prefix]"""


def tally(held: Held) -> dict[str, Tallied]:
    """Per node that can serve any of the keys, how many.

    A prefix is counted over any mix of a node's tiers, and per tier by itself.
    """
    counts = np.bincount(held.rows, minlength=len(held.sets))
    first = held.first(held.rows)

    def counted(sets: Bools) -> Iterable[list[int]]:
        both: list[list[int]] = np.stack(
            [counts @ sets, _gaps(first, len(held), sets)], axis=1
        ).tolist()
        return both

    tallied = {
        node: Tallied(found, prefix)
        for node, (found, prefix) in zip(held.nodes, counted(held.per_node(held.sets)), strict=True)
    }
    for (node, tier), both in zip(held.places, counted(held.sets), strict=True):
        tallied[node].tiers[tier] = both
    return tallied
