"""What the control plane is told of a node, and has it do: the node's side of its reporter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvstrata.api import HostUse, NodeRegistration, StoreRef
from kvstrata.node.pulls import Pulls
from kvstrata.node.reported import (
    Drop,
    PlacementChange,
    Pull,
    PullResult,
    Shed,
    WriteBack,
    Written,
)
from kvstrata.node.shedding import shed
from kvstrata.node.status import ailing_stores
from kvstrata.node.store import Store
from kvstrata.node.writeback import write_back

__all__ = ["Controlled"]

_log = logging.getLogger(__name__)


class Controlled:
    """A `Reported` node: `registered` is what it registers with but for its stores, `health` tells
    how all of it is."""

    def __init__(
        self,
        registered: NodeRegistration,
        store: Store,
        pulls: Pulls,
        health: Callable[[], tuple[bool, str]],
    ) -> None:
        self._registered = registered
        self._store = store
        self._pulls = pulls
        self._health = health

    # ------------------------------------------------------------ what is so

    def registration(self) -> NodeRegistration:
        stores = [
            StoreRef(id=guard.store_id, tier=guard.kind)
            for guard in self._store.guards
            if guard.tier.writable
        ]
        return NodeRegistration.model_validate({**dict(self._registered), "stores": stores})

    def host_use(self) -> HostUse:
        usage = self._store.host.usage()
        return HostUse(used_bytes=usage.used, capacity_bytes=usage.capacity, chunks=usage.chunks)

    def health(self) -> tuple[bool, str]:
        return self._health()

    def ailing(self) -> Sequence[str]:
        return ailing_stores(self._store.guards)

    def take_changes(self) -> Sequence[PlacementChange]:
        return self._store.placements.take()

    def snapshot(self) -> Sequence[PlacementChange]:
        self._store.placements.take()
        here = [PlacementChange("host", self._store.host.keys())]
        here += [
            PlacementChange(guard.store_id, guard.keys())
            for guard in self._store.guards
            if guard.tier.writable
        ]
        return here

    def namespace_documents(self) -> Mapping[bytes, bytes]:
        return {n.digest: n.document for n in self._store.namespaces.all()}

    # ------------------------------------------------------------ what is to be done

    @property
    def draining(self) -> bool:
        return self._store.draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        if draining != self._store.draining:
            _log.info("takes %s new chunks", "no" if draining else "again")
        self._store.draining = draining

    async def pull(self, pull: Pull) -> PullResult:
        return await self._pulls.pull(pull)

    def keep(self, transfer: str) -> None:
        self._pulls.keep(transfer)

    def told(self, transfer: str) -> None:
        self._pulls.told(transfer)

    def release(self, transfer: str) -> None:
        self._pulls.release(transfer)

    async def drop(self, asked: Drop) -> Mapping[str, int]:
        tiers = asked.tiers or (
            "host",
            *(guard.name for guard in self._store.guards if guard.tier.writable),
        )
        return await self._store.drop(tiers, asked.keys, asked.digests)

    async def write_back(self, asked: WriteBack, written: Written) -> None:
        await write_back(self._store, asked, written)

    async def shed(self, asked: Shed) -> Mapping[str, int]:
        return await shed(self._store.host, self._store.guards, asked)
