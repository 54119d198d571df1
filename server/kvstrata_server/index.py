"""Who holds which chunk: the in-process index that lookups are served from.

A location is what one node reported about its host memory or about one store. Per chunk the
index keeps the set of locations that hold it. Few different sets exist, so each is kept once
and shared: a chunk costs a pointer, and a lookup of a prefix falls into runs of one set each.

It knows nothing of time, SQL or HTTP. All calls are synchronous and work on batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from kvstrata.keys import Key

__all__ = ["HOST", "LocationId", "PlacementIndex", "Reach", "Tallied"]

HOST = "host"

LocationId = int
Holders = frozenset[LocationId]

Reach = Mapping[LocationId, Sequence[tuple[str, str]]]
"""Which nodes can serve what lies at a location, and as which tier: (node, tier) pairs."""

_NOBODY: Holders = frozenset()


@dataclass(slots=True)
class Tallied:
    """What one node can serve of the keys asked: in all, from the first key on, per tier."""

    found: int = 0
    prefix: int = 0
    tiers: dict[str, list[int]] = field(default_factory=dict)
    """tier -> [found, prefix]"""


class PlacementIndex:
    """Chunk -> the locations that hold it, and location -> its chunks."""

    def __init__(self) -> None:
        self._holders: dict[Key, Holders] = {}
        self._keys: dict[LocationId, set[Key]] = {}
        self._shared: dict[Holders, Holders] = {}
        self._shared_limit = 1024

    def __len__(self) -> int:
        """Chunks held anywhere."""
        return len(self._holders)

    @property
    def placements(self) -> int:
        """(chunk, location) pairs."""
        return sum(len(keys) for keys in self._keys.values())

    def keys_at(self, location: LocationId) -> Set[Key]:
        return self._keys.get(location, set())

    def add(self, location: LocationId, keys: Iterable[Key]) -> list[Key]:
        """Returns those that were not there yet."""
        mine = self._keys.setdefault(location, set())
        new = [key for key in dict.fromkeys(keys) if key not in mine]
        mine.update(new)
        # Within a batch most chunks go from one set to the same other one.
        seen: dict[Holders, Holders] = {}
        holders = self._holders
        for key in new:
            before = holders.get(key, _NOBODY)
            after = seen.get(before)
            if after is None:
                after = seen[before] = self._share(before | {location})
            holders[key] = after
        return new

    def remove(self, location: LocationId, keys: Iterable[Key]) -> list[Key]:
        """Returns those that were there."""
        mine = self._keys.get(location)
        if not mine:
            return []
        old = [key for key in dict.fromkeys(keys) if key in mine]
        mine.difference_update(old)
        seen: dict[Holders, Holders] = {}
        holders = self._holders
        for key in old:
            before = holders[key]
            after = seen.get(before)
            if after is None:
                after = seen[before] = self._share(before - {location})
            if after:
                holders[key] = after
            else:
                del holders[key]
        return old

    def replace(self, location: LocationId, keys: Set[Key]) -> tuple[list[Key], list[Key]]:
        """Make `keys` all that is there. Returns (added, removed)."""
        removed = self.remove(location, self.keys_at(location) - keys)
        return self.add(location, keys), removed

    def clear(self, location: LocationId) -> list[Key]:
        """Forget all that is there. Returns it."""
        removed = self.remove(location, list(self.keys_at(location)))
        self._keys.pop(location, None)
        return removed

    def holders(self, keys: Iterable[Key]) -> list[Holders]:
        return [self._holders.get(key, _NOBODY) for key in keys]

    def tally(self, keys: Sequence[Key], reach: Reach) -> dict[str, Tallied]:
        """Per node that `reach` names and that can serve any of `keys`, how many.

        A prefix is counted over any mix of a node's tiers, and per tier by itself.
        """
        found: dict[str, Tallied] = {}
        nodes_of: dict[Holders, list[tuple[str, set[str]]]] = {}
        position = 0
        for holders, length in _runs(self.holders(keys)):
            nodes = nodes_of.get(holders)
            if nodes is None:
                nodes = nodes_of[holders] = _reached(holders, reach)
            for node, tiers in nodes:
                tallied = found.setdefault(node, Tallied())
                tallied.found += length
                if tallied.prefix == position:
                    tallied.prefix += length
                for tier in tiers:
                    count = tallied.tiers.setdefault(tier, [0, 0])
                    count[0] += length
                    if count[1] == position:
                        count[1] += length
            position += length
        return found

    def _share(self, holders: Holders) -> Holders:
        shared = self._shared.setdefault(holders, holders)
        if len(self._shared) > self._shared_limit:
            # Sets nobody uses any more pile up as nodes come and go.
            self._shared = {used: used for used in set(self._holders.values())}
            self._shared[shared] = shared
            self._shared_limit = max(1024, 2 * len(self._shared))
        return shared


def _runs(holders: Iterable[Holders]) -> Iterator[tuple[Holders, int]]:
    """Neighbours with the same holders, counted."""
    current: Holders | None = None
    length = 0
    for each in holders:
        if each is current or each == current:
            length += 1
            continue
        if current is not None:
            yield current, length
        current, length = each, 1
    if current is not None:
        yield current, length


def _reached(holders: Holders, reach: Reach) -> list[tuple[str, set[str]]]:
    nodes: dict[str, set[str]] = {}
    for location in holders:
        for node, tier in reach.get(location, ()):
            nodes.setdefault(node, set()).add(tier)
    return list(nodes.items())
