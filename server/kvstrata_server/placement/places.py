"""Locations: what one node reports about its host memory, or about one store.

A store that nodes share has a location for each of them. What is in it is offered by every node
that has it attached, whoever reported it; what one of them removes from it is gone for all.

Calls that change something return what has to be written to SQL, to be put there as one change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from kvstrata_server.placement.batches import KeyBatch
from kvstrata_server.placement.index import HOST, Added, LocationId, PlacementIndex, Removed
from kvstrata_server.placement.placement_writes import (
    AddPlacements,
    ClearPlacements,
    DropPlacements,
)
from kvstrata_server.sql.writes import DropLocation, PutLocation, PutStore, Write

__all__ = ["PlaceChange", "Places", "Serves"]


@dataclass(frozen=True, slots=True)
class PlaceChange:
    location: LocationId
    added: KeyBatch
    removed: KeyBatch


class Places:
    """Numbers of locations, which stores they belong to, and changes of the index by them."""

    def __init__(self, index: PlacementIndex) -> None:
        self.index = index
        self._of_node: dict[str, dict[str | None, LocationId]] = {}
        self._about: dict[LocationId, tuple[str, str | None]] = {}
        self._sharing: dict[str, dict[LocationId, None]] = {}
        self._tiers: dict[str, str] = {}

    def clear(self) -> None:
        """Forget all locations and what is there."""
        for location in self._about:
            self.index.clear(location)
        for known in (self._of_node, self._about, self._sharing):
            known.clear()

    def load_store(self, store: str, tier: str) -> None:
        self._tiers[store] = tier

    def load_location(self, location: LocationId, node: str, store: str | None) -> None:
        self._of_node.setdefault(node, {})[store] = location
        self._about[location] = node, store
        if store is not None:
            self._sharing.setdefault(store, {})[location] = None

    def tier(self, store: str) -> str:
        return self._tiers[store]

    def location(self, node: str, store: str | None) -> LocationId:
        """`store` is None for host memory. It must have been attached once."""
        return self._of_node[node][store]

    def locations(self, node: str) -> Mapping[str | None, LocationId]:
        """All that this node ever had; None: its host memory."""
        return self._of_node.get(node, {})

    def sharing(self, store: str) -> Collection[LocationId]:
        """Locations of one store, of all nodes that ever had it attached."""
        return self._sharing.get(store, ())

    def describe(self, location: LocationId) -> tuple[str, str | None]:
        """The node that reports about it, and the store; None: the node's host memory."""
        return self._about[location]

    def about(self, location: LocationId) -> tuple[str, str | None] | None:
        """The same; None where there is no such location (any more)."""
        return self._about.get(location)

    def attach(self, node: str, stores: Mapping[str, str]) -> list[Write]:
        """The node has these stores (id -> tier) now, and no others."""
        writes: list[Write] = []
        for store, tier in stores.items():
            if self._tiers.get(store) != tier:
                self._tiers[store] = tier
                writes.append(PutStore(store, tier))
        for name in dict.fromkeys([None, *self._of_node.get(node, {}), *stores]):
            if name not in self._of_node.get(node, {}):
                self.load_location(self._new_number(node, name), node, name)
            attached = name is None or name in stores
            writes.append(PutLocation(self.location(node, name), node, name, attached))
        return writes

    def _new_number(self, node: str, store: str | None) -> LocationId:
        """Of a hash, so that servers that share a database find the same one."""
        named = node if store is None else f"{node}\0{store}"
        number = xxhash.xxh3_64_intdigest(named.encode()) >> 1
        while number in self._about:
            number += 1
        return number

    def left(self, node: str) -> None:
        """It was taken out of service. For those who watch: nothing changes here."""

    def void_host(self, node: str) -> list[Write]:
        location = self.location(node, None)
        self.index.clear(location)
        return [ClearPlacements(location)]

    def apply(self, changes: Iterable[PlaceChange]) -> list[Write]:
        """Removals before additions."""
        writes: list[Write] = []
        for change in changes:
            if len(change.removed):
                store = self._about[change.location][1]
                if store is None:
                    writes += _written(self.index.remove(change.location, change.removed))
                else:
                    sharing = self._sharing[store]
                    for removed in self.index.remove_everywhere(sharing, change.removed):
                        writes += _written(removed)
                        if removed.location != change.location:
                            self._gone_from(removed.location, change.removed)
            if len(change.added):
                writes += _written(self.index.add(change.location, change.added))
        return writes

    def _gone_from(self, location: LocationId, keys: KeyBatch) -> None:
        """Another node's removal from a store reached what this location had of it."""

    def replace(
        self,
        node: str,
        held: Mapping[LocationId, KeyBatch],
        attached: Callable[[str, str], bool],
        rewrite: bool = False,
    ) -> list[Write]:
        """All that this node reports. `attached(node, store)`: whether that is so now.

        What nodes that have left said of a store gives way to what a present one finds there.
        `rewrite`: SQL may hold what this index never saw, so replace the rows as well.
        """
        writes: list[Write] = []
        for store, location in self._of_node[node].items():
            keys = held.get(location) or self.index.families.of_keys(())
            if rewrite:
                self.index.clear(location)
                writes.append(ClearPlacements(location))
            for change in self.index.replace(location, keys):
                writes += _written(change)
            if store is not None and attached(node, store):
                for shared in self._sharing[store]:
                    if not attached(self._about[shared][0], store):
                        writes += self._clear(shared, rewrite)
        return writes

    def _clear(self, location: LocationId, rewrite: bool) -> list[Write]:
        removed = self.index.clear(location)
        return [ClearPlacements(location)] if rewrite or len(removed) else []

    def forget(self, node: str, attached: Callable[[str, str], bool]) -> list[Write]:
        """The node is no more. What it found in a store that others have is theirs to tell of."""
        writes: list[Write] = []
        for store, location in self._of_node.pop(node, {}).items():
            if store is not None:
                del self._sharing[store][location]
                others = (h for h in self._sharing[store] if attached(self._about[h][0], store))
                heir = next(others, None)
                if heir is not None:
                    writes += _written(self.index.add(heir, self.index.batch_at(location)))
            self.index.clear(location)
            del self._about[location]
            writes += [ClearPlacements(location), DropLocation(location)]
        return writes

    def reach(self, stores_of: StoresOf) -> Serves:
        """What the nodes that `stores_of` knows can serve."""
        return Serves(self, stores_of)


StoresOf = Callable[[str], Mapping[str, str] | None]
"""The stores (id -> tier) of a node by its id; None: it doesn't count."""


class Serves:
    """Which of some nodes can serve what lies at a location, and as which tier.

    Worked out when asked: a lookup meets few of the nodes and locations there are.
    """

    def __init__(self, places: Places, stores_of: StoresOf) -> None:
        self._places = places
        self._stores_of = stores_of
        self._known: dict[LocationId, list[tuple[str, str]]] = {}
        self._of_store: dict[str, list[tuple[str, str]]] = {}

    def get(
        self, location: LocationId, default: Sequence[tuple[str, str]] = ()
    ) -> Sequence[tuple[str, str]]:
        served = self._known.get(location)
        if served is None:
            served = self._known[location] = self._served(location)
        return served or default

    def _served(self, location: LocationId) -> list[tuple[str, str]]:
        about = self._places.about(location)
        if about is None:
            return []  # its node was forgotten meanwhile
        reporter, store = about
        if store is None:
            return [] if self._stores_of(reporter) is None else [(reporter, HOST)]
        if store not in self._of_store:
            self._of_store[store] = self._served_from(store)
        return self._of_store[store]

    def _served_from(self, store: str) -> list[tuple[str, str]]:
        served = []
        for shared in self._places.sharing(store):
            node, _ = self._places.describe(shared)
            stores = self._stores_of(node)
            if stores is not None and store in stores:
                served.append((node, stores[store]))
        return served


def _written(change: Added | Removed) -> list[Write]:
    if isinstance(change, Removed):
        return [DropPlacements(change)] if len(change) else []
    return [AddPlacements(change)] if len(change) else []
