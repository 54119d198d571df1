"""Nodes as the control plane sees them: what they hold, and the reporter's real outbox."""

from __future__ import annotations

from server_kit import NAMESPACE

from kvstrata import api
from kvstrata.keys import Key
from kvstrata.node.outbox import Outbox
from kvstrata.node.placements import PlacementChange, Placements

SHARED = "mount"


class NodeProcess:
    """One incarnation of a node: what it holds, what it has not reported, and its outbox."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        stores: dict[str, set[Key]],
        batch_keys: int = 2,
        pending_keys: int = 6,
    ) -> None:
        self.name = name
        self.incarnation = f"i{incarnation}"
        self.held: dict[str, set[Key]] = {"host": set(), **stores}
        self.placements = Placements()
        self.placements.enabled = True
        self.outbox = Outbox(self, batch_keys, pending_keys)
        self.registered = False

    def registration(self) -> api.NodeRegistration:
        return api.NodeRegistration(
            id=self.name,
            incarnation=self.incarnation,
            stores=[api.StoreRef(id=n, tier="fs") for n in self.held if n != "host"],
        )

    def take_changes(self) -> list[PlacementChange]:
        return self.placements.take()

    def snapshot(self) -> list[PlacementChange]:
        self.placements.take()
        return [PlacementChange(name, sorted(keys), []) for name, keys in self.held.items()]

    def namespace_documents(self) -> dict[bytes, bytes]:
        return {NAMESPACE.digest: NAMESPACE.document}
