"""Locations: what one node reports about its host memory, or about one store.

A store that nodes share has a location for each of them. What is in it is offered by every node
that has it attached, whoever reported it; what one of them removes from it is gone for all.

Calls that change something return what has to be written to SQL, to be put there as one change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstrata.keys import Key
from kvstrata_server.index import HOST, LocationId, PlacementIndex
from kvstrata_server.writes import (
    AddPlacements,
    ClearPlacements,
    DropPlacements,
    PutLocation,
    PutStore,
    Write,
)

__all__ = ["PlaceChange", "Places"]


@dataclass(frozen=True, slots=True)
class PlaceChange:
    location: LocationId
    added: Sequence[Key]
    removed: Sequence[Key]


class Places:
    """Numbers of locations, which stores they belong to, and changes of the index by them."""

    def __init__(self, index: PlacementIndex) -> None:
        self.index = index
        self._of_node: dict[str, dict[str | None, LocationId]] = {}
        self._about: dict[LocationId, tuple[str, str | None]] = {}
        self._sharing: dict[str, list[LocationId]] = {}
        self._tiers: dict[str, str] = {}

    def load_store(self, store: str, tier: str) -> None:
        self._tiers[store] = tier

    def load_location(self, location: LocationId, node: str, store: str | None) -> None:
        self._of_node.setdefault(node, {})[store] = location
        self._about[location] = node, store
        if store is not None:
            self._sharing.setdefault(store, []).append(location)

    def tier(self, store: str) -> str:
        return self._tiers[store]

    def location(self, node: str, store: str | None) -> LocationId:
        """`store` is None for host memory. It must have been attached once."""
        return self._of_node[node][store]

    def describe(self, location: LocationId) -> tuple[str, str | None]:
        """The node that reports about it, and the store; None: the node's host memory."""
        return self._about[location]

    def attach(self, node: str, stores: Mapping[str, str]) -> list[Write]:
        """The node has these stores (id -> tier) now, and no others."""
        writes: list[Write] = []
        for store, tier in stores.items():
            if self._tiers.get(store) != tier:
                self._tiers[store] = tier
                writes.append(PutStore(store, tier))
        for name in dict.fromkeys([None, *self._of_node.get(node, {}), *stores]):
            if name not in self._of_node.get(node, {}):
                self.load_location(max(self._about, default=0) + 1, node, name)
            attached = name is None or name in stores
            writes.append(PutLocation(self.location(node, name), node, name, attached))
        return writes

    def void_host(self, node: str) -> list[Write]:
        location = self.location(node, None)
        self.index.clear(location)
        return [ClearPlacements(location)]

    def apply(self, changes: Iterable[PlaceChange]) -> list[Write]:
        """Removals before additions."""
        writes: list[Write] = []
        for change in changes:
            store = self._about[change.location][1]
            for shared in (change.location,) if store is None else self._sharing[store]:
                writes += _written(shared, [], self.index.remove(shared, change.removed))
            added = self.index.add(change.location, change.added)
            writes += _written(change.location, added, [])
        return writes

    def replace(
        self,
        node: str,
        held: Mapping[LocationId, set[Key]],
        attached: Callable[[str, str], bool],
    ) -> list[Write]:
        """All that this node reports. `attached(node, store)`: whether that is so now.

        What nodes that have left said of a store gives way to what a present one finds there.
        """
        writes: list[Write] = []
        for store, location in self._of_node[node].items():
            added, removed = self.index.replace(location, held.get(location, set()))
            writes += _written(location, added, removed)
            if store is not None and attached(node, store):
                for shared in self._sharing[store]:
                    if not attached(self._about[shared][0], store):
                        writes += _written(shared, [], self.index.clear(shared))
        return writes

    def reach(
        self, nodes: Iterable[tuple[str, Mapping[str, str]]]
    ) -> dict[LocationId, list[tuple[str, str]]]:
        """Which of these nodes (id, stores) can serve what lies at each location, as which tier."""
        reach: dict[LocationId, list[tuple[str, str]]] = {}
        for node, stores in nodes:
            reach.setdefault(self.location(node, None), []).append((node, HOST))
            for store, tier in stores.items():
                for location in self._sharing[store]:
                    reach.setdefault(location, []).append((node, tier))
        return reach


def _written(location: LocationId, added: Sequence[Key], removed: Sequence[Key]) -> list[Write]:
    writes: list[Write] = []
    if removed:
        writes.append(DropPlacements(location, removed))
    if added:
        writes.append(AddPlacements(location, added))
    return writes
