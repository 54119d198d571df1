"""Who can serve some keys: what the index found, counted per node and per tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvstrata_server.placement.batches import Numbers

__all__ = ["Held", "Reach", "Run", "Serving", "Tallied", "runs_of", "serving", "tally"]

Serving = list[tuple[str, set[str]]]
"""Nodes, each with the tiers that it serves something from."""

Run = tuple[int, int, int]
"""Neighbours of one number: (number, position, length)."""


class Reach(Protocol):
    """Which nodes can serve what lies at a location, and as which tier: (node, tier) pairs."""

    def get(
        self, location: int, default: Sequence[tuple[str, str]], /
    ) -> Sequence[tuple[str, str]]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Per key the number of a set of locations (`numbers`, n uint32), by which few differ, and who
    serves what lies in each (`by_set`)."""

    numbers: Numbers
    runs: list[Run]
    by_set: Mapping[int, Serving]

    def __len__(self) -> int:
        return len(self.numbers)


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
    found: dict[str, Tallied] = {}
    for number, position, length in held.runs:
        for node, tiers in held.by_set[number]:
            tallied = found.setdefault(node, Tallied())
            tallied.found += length
            if tallied.prefix == position:
                tallied.prefix += length
            for tier in tiers:
                count = tallied.tiers.setdefault(tier, [0, 0])
                count[0] += length
                if count[1] == position:
                    count[1] += length
    return found


def serving(holders: Sequence[int], reach: Reach) -> Serving:
    """Who serves what is at all these locations."""
    nodes: dict[str, set[str]] = {}
    for location in holders:
        for node, tier in reach.get(location, ()):
            nodes.setdefault(node, set()).add(tier)
    return list(nodes.items())


def runs_of(numbers: Numbers) -> Iterator[Run]:
    if not len(numbers):
        return
    starts = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    lengths = np.diff(np.append(starts, len(numbers)))
    yield from zip(numbers[starts].tolist(), starts.tolist(), lengths.tolist(), strict=True)
