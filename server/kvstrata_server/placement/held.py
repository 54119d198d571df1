"""Who can serve some keys: what the index found, counted per node and per tier.

Of many keys few sets of holders differ, and of those few are served by different nodes: a store
that a thousand nodes share is one place to serve from, whoever of them reported a chunk. So what is
asked of each key is worked out for each such set.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
        if len(self.nodes) == len(self.places):
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
        self._served: dict[int, list[int]] = {}
        """Places by the identity of what a location serves, which is one of all of a store."""
        self._places: dict[tuple[str, str], int] = {}
        """Numbered as they come."""
        self._cells = array("q")
        """Places of one row after another; and how many each row has."""
        self._sizes: list[int] = []

    def row(self, holders: tuple[int, ...]) -> int:
        """The row of `Held.sets` for keys that are at these locations."""
        row = self._rows.get(holders)
        if row is None:
            served = {}
            for location in holders:
                if each := self._reach.get(location, ()):
                    served[id(each)] = each
            row = self._rows[holders] = self._row_of(served)
        return row

    def _row_of(self, served: dict[int, Sequence[tuple[str, str]]]) -> int:
        row = self._by_served.setdefault(frozenset(served), len(self._sizes))
        if row == len(self._sizes):
            cells: set[int] = set()
            for name, places in served.items():
                numbers = self._served.get(name)
                if numbers is None:
                    numbers = self._served[name] = [
                        self._places.setdefault(place, len(self._places)) for place in places
                    ]
                cells.update(numbers)
            self._cells.extend(cells)
            self._sizes.append(len(cells))
        return row

    def held(self, rows: Ints) -> Held:
        """`rows` as `row` gave them, per key."""
        places = sorted(self._places)
        sets = np.zeros((len(self._sizes), len(places)), bool)
        full = [row for row, size in enumerate(self._sizes) if size == len(places)]
        sets[full] = True
        if len(full) * len(places) < len(self._cells):  # there are others
            columns = np.empty(len(places), np.int64)
            columns[[self._places[place] for place in places]] = np.arange(len(places))
            cells = columns[np.frombuffer(self._cells, np.int64)]
            sets[np.repeat(np.arange(len(sets)), self._sizes), cells] = True
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

    def counted(sets: Bools) -> list[list[int]]:
        both: list[list[int]] = np.array([counts @ sets, _gaps(first, len(held), sets)]).T.tolist()
        return both

    per_node = held.per_node(held.sets)
    per_place = counted(held.sets)
    of_nodes = per_place if per_node is held.sets else counted(per_node)
    tallied = {
        node: Tallied(found, prefix)
        for node, (found, prefix) in zip(held.nodes, of_nodes, strict=True)
    }
    for (node, tier), both in zip(held.places, per_place, strict=True):
        tallied[node].tiers[tier] = both
    return tallied
