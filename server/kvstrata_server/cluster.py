"""What the control plane knows of the nodes: soft state, of which the node owns the truth.

A node reports what changed in numbered batches. What keeps the index equal to the node:

    report arrives with             then
    seq already applied             ignored (a repetition after a lost answer)
    the expected seq                applied
    a later seq                     nothing is applied until a snapshot comes
    a snapshot's first part         accepted at any seq from the expected one on
    a snapshot's last part          what was known of this node is replaced by its parts
    an incarnation of the past      `Expired`; of an unknown node: `Missing` (it registers again)

A new incarnation starts with an empty host memory, so what the old one held there is void; what
it had put into stores survives. After `heartbeat_ttl` of silence a node is not offered, though
other nodes that share its stores are.

`next_seq` is stored with each batch, in one transaction with the placements it covers. So after
a restart, however it came about, a node that reported something SQL missed is seen to be ahead
and asked for a snapshot, while those that SQL has entirely just go on: asking all of them would
make every deployment of a new version cost a report of all chunks of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvstrata import api
from kvstrata.errors import Expired, Malformed, Missing
from kvstrata.keys import Key, Namespace
from kvstrata_server.clock import Clock
from kvstrata_server.index import HOST, LocationId, PlacementIndex
from kvstrata_server.metrics import Metrics
from kvstrata_server.namespaces import Namespaces
from kvstrata_server.writer import Writer
from kvstrata_server.writes import (
    AddPlacements,
    ClearPlacements,
    DropPlacements,
    PutLocation,
    PutNode,
    PutStore,
    SetSeq,
)

__all__ = ["Cluster", "Node", "keys_of"]


@dataclass(slots=True)
class Node:
    """One node as last registered. `last_seen` is None until it speaks to this process."""

    id: str
    incarnation: str
    next_seq: int = 0
    peer_address: str | None = None
    transports: tuple[str, ...] = ()
    capacity_bytes: int = 0
    stores: dict[str, str] = field(default_factory=dict)
    """store id -> tier, of the stores attached now"""
    gone: bool = False
    registered: float = 0.0
    last_seen: float | None = None
    host: api.HostUse | None = None
    healthy: bool = True
    detail: str = ""
    snapshot_wanted: bool = False
    staged: dict[LocationId, set[Key]] | None = None
    """Parts of a snapshot that is not complete."""


class Cluster:
    """Nodes, their stores, and the index of what they hold. Not thread-safe: one event loop."""

    def __init__(
        self,
        index: PlacementIndex,
        namespaces: Namespaces,
        writer: Writer,
        metrics: Metrics,
        clock: Clock,
        heartbeat_ttl: float,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.index = index
        self.namespaces = namespaces
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._ttl = heartbeat_ttl
        self._locations: dict[str, dict[str | None, LocationId]] = {}
        self._about: dict[LocationId, tuple[str, str | None]] = {}
        self._sharing: dict[str, list[LocationId]] = {}
        self._store_tiers: dict[str, str] = {}

    # ------------------------------------------------------------ loading

    def load_node(self, node: Node) -> None:
        self.nodes[node.id] = node

    def load_store(self, store: str, tier: str) -> None:
        self._store_tiers[store] = tier

    def load_location(
        self, location: LocationId, node: str, store: str | None, attached: bool
    ) -> None:
        self._locations.setdefault(node, {})[store] = location
        self._about[location] = node, store
        if store is not None:
            self._sharing.setdefault(store, []).append(location)
            if attached:
                self.nodes[node].stores[store] = self._store_tiers[store]

    # ------------------------------------------------------------ nodes

    def known(self, node_id: str) -> Node:
        """Raises `Missing` for a node that never registered."""
        node = self.nodes.get(node_id)
        if node is None:
            raise Missing(f"node {node_id!r} never registered here")
        return node

    def require(self, node_id: str) -> Node:
        """Raises `Missing` also for a node that was taken out of service."""
        node = self.known(node_id)
        if node.gone:
            raise Missing(f"node {node_id!r} was taken out of service")
        return node

    def require_current(self, node_id: str, incarnation: str) -> Node:
        """Raises `Expired` if this is not the incarnation that registered last."""
        node = self.require(node_id)
        if node.incarnation != incarnation:
            raise Expired(
                f"node {node_id!r} is registered as incarnation {node.incarnation!r}, and "
                f"{incarnation!r} is not it: register again, or give one of two nodes another id"
            )
        return node

    def state(self, node: Node) -> api.NodeState:
        if node.gone:
            return api.NodeState.GONE
        if node.last_seen is None or self._clock() - node.last_seen > self._ttl:
            return api.NodeState.SILENT
        return api.NodeState.UP

    def age(self, node: Node) -> float:
        """Seconds since it was last heard."""
        seen = node.registered if node.last_seen is None else node.last_seen
        return max(0.0, self._clock() - seen)

    def up(self) -> list[Node]:
        return [node for node in self.nodes.values() if self.state(node) is api.NodeState.UP]

    def info(self, node: Node) -> api.NodeInfo:
        host = node.host or api.HostUse(used_bytes=0, capacity_bytes=node.capacity_bytes, chunks=0)
        return api.NodeInfo(
            id=node.id,
            incarnation=node.incarnation,
            state=self.state(node),
            peer_address=node.peer_address,
            transports=list(node.transports),
            host=host,
            stores=[api.StoreRef(id=store, tier=tier) for store, tier in node.stores.items()],
            healthy=node.healthy,
            detail=node.detail,
            heartbeat_age=self.age(node),
        )

    def page(self, after: str | None, limit: int) -> api.NodeList:
        rest = sorted(n for n in self.nodes if after is None or n > after)
        shown = [self.info(self.nodes[n]) for n in rest[:limit]]
        return api.NodeList(nodes=shown, next=shown[-1].id if len(rest) > limit else None)

    def register(self, asked: api.NodeRegistration) -> api.RegistrationReply:
        stores = {store.id: store.tier for store in asked.stores}
        if HOST in stores or len(stores) != len(asked.stores):
            raise Malformed(f"stores must have distinct ids, and {HOST!r} is not one")
        self._writer.require_room()
        node = self.nodes.get(asked.id)
        if node is None:
            node = self.nodes[asked.id] = Node(asked.id, asked.incarnation)
        elif node.incarnation != asked.incarnation:
            self._void_host(node)
            node.incarnation = asked.incarnation
            node.next_seq, node.staged, node.snapshot_wanted = 0, None, False
            node.host = None
        elif node.gone:
            node.snapshot_wanted = True
        node.peer_address = asked.peer_address
        node.transports = tuple(asked.transports)
        node.capacity_bytes = asked.capacity_bytes
        node.gone, node.healthy, node.detail = False, True, ""
        node.registered = node.last_seen = self._clock()
        self._put_node(node)
        self._attach(node, stores)
        return api.RegistrationReply(
            node=node.id,
            incarnation=node.incarnation,
            heartbeat_ttl=self._ttl,
            next_seq=node.next_seq,
        )

    def deregister(self, node_id: str, incarnation: str | None) -> Node:
        node = self.require(node_id)
        if incarnation is not None:
            self.require_current(node_id, incarnation)
        self._void_host(node)
        node.gone, node.staged = True, None
        self._put_node(node)
        return node

    def heartbeat(self, node_id: str, beat: api.HeartbeatRequest) -> api.HeartbeatReply:
        node = self.require_current(node_id, beat.incarnation)
        node.last_seen = self._clock()
        node.host, node.healthy, node.detail = beat.host, beat.healthy, beat.detail
        if beat.next_seq is not None and beat.next_seq > node.next_seq:
            node.staged, node.snapshot_wanted = None, True
        return api.HeartbeatReply(snapshot_wanted=node.snapshot_wanted)

    # ------------------------------------------------------------ placements

    def report(self, node_id: str, report: api.Report) -> api.ReportReply:
        node = self.require_current(node_id, report.incarnation)
        if report.seq < node.next_seq:
            self._metrics.reports.labels("repeated").inc()
        elif not self._continues(node, report):
            node.staged, node.snapshot_wanted = None, True
            self._metrics.reports.labels("gap").inc()
        else:
            self._apply(node, report)
            self._metrics.reports.labels("applied").inc()
            return api.ReportReply(applied=True, next_seq=node.next_seq)
        node.last_seen = self._clock()
        return api.ReportReply(
            applied=False, next_seq=node.next_seq, snapshot_wanted=node.snapshot_wanted
        )

    @staticmethod
    def _continues(node: Node, report: api.Report) -> bool:
        if report.snapshot in ("first", "only"):
            return True
        if report.seq != node.next_seq:
            return False
        if report.snapshot == "no":
            return node.staged is None and not node.snapshot_wanted
        return node.staged is not None

    def _apply(self, node: Node, report: api.Report) -> None:
        """All of it or, if something is wrong with the report, nothing."""
        changes = [
            (self._location(node, change.location), keys_of(change.added), keys_of(change.removed))
            for change in report.changes
        ]
        documents = [Namespace.parse(document.encode()) for document in report.namespaces]
        self._writer.require_room()
        self.namespaces.learn(documents)
        for _, added, _ in changes:
            self.namespaces.mention(added)
        if report.snapshot == "no":
            for location, added, removed in changes:
                self._remove(location, removed)
                self._add(location, added)
        else:
            if node.staged is None or report.snapshot in ("first", "only"):
                node.staged = {}  # for `more` and `last` it is there: see _continues
            for location, added, _ in changes:
                node.staged.setdefault(location, set()).update(added)
        node.next_seq = report.seq + 1
        node.last_seen = self._clock()
        if report.snapshot in ("last", "only"):
            self._replace(node)
        if node.staged is None:
            # Not between the parts of a snapshot: half of one is worth nothing after a restart.
            self._writer.put(SetSeq(node.id, node.incarnation, node.next_seq))

    def _replace(self, node: Node) -> None:
        staged, node.staged, node.snapshot_wanted = node.staged or {}, None, False
        for location in self._locations[node.id].values():
            added, removed = self.index.replace(location, staged.get(location, set()))
            self._put_changes(location, added, removed)
        for store in node.stores:
            self._drop_orphans(store)

    def _drop_orphans(self, store: str) -> None:
        """What nodes that have left said of a store gives way to what a present one finds there."""
        for location in self._sharing[store]:
            node = self.nodes[self._about[location][0]]
            if node.gone or store not in node.stores:
                self._put_changes(location, [], self.index.clear(location))

    def _location(self, node: Node, name: str) -> LocationId:
        store = None if name == HOST else name
        if store is not None and store not in node.stores:
            raise Malformed(
                f"node {node.id!r} reports about {name!r}, which is neither {HOST!r} nor one of "
                f"the stores it registered: {sorted(node.stores)}"
            )
        return self._locations[node.id][store]

    def _add(self, location: LocationId, keys: Sequence[Key]) -> None:
        self._put_changes(location, self.index.add(location, keys), [])

    def _remove(self, location: LocationId, keys: Sequence[Key]) -> None:
        """From a store: whoever reported it there, it is gone for all who share the store."""
        store = self._about[location][1]
        for shared in (location,) if store is None else self._sharing[store]:
            self._put_changes(shared, [], self.index.remove(shared, keys))

    def describe(self, location: LocationId) -> tuple[str, str | None]:
        """The node that reports about it, and the store; None: the node's host memory."""
        return self._about[location]

    def reach(self, among: Iterable[Node]) -> dict[LocationId, list[tuple[str, str]]]:
        """Which of these nodes can serve what lies at each location, and as which tier."""
        reach: dict[LocationId, list[tuple[str, str]]] = {}
        for node in among:
            host = self._locations[node.id][None]
            reach.setdefault(host, []).append((node.id, HOST))
            for store, tier in node.stores.items():
                for location in self._sharing[store]:
                    reach.setdefault(location, []).append((node.id, tier))
        return reach

    # ------------------------------------------------------------ rows

    def _void_host(self, node: Node) -> None:
        location = self._locations[node.id][None]
        self.index.clear(location)
        self._writer.put(ClearPlacements(location))

    def _attach(self, node: Node, stores: dict[str, str]) -> None:
        before, node.stores = node.stores, stores
        for store, tier in stores.items():
            if self._store_tiers.get(store) != tier:
                self._store_tiers[store] = tier
                self._writer.put(PutStore(store, tier))
        for name in (None, *dict.fromkeys([*before, *stores])):
            location = self._locations.get(node.id, {}).get(name)
            if location is None:
                location = max(self._about, default=0) + 1
                self.load_location(location, node.id, name, attached=False)
            attached = name is None or name in stores
            self._writer.put(PutLocation(location, node.id, name, attached))

    def _put_node(self, node: Node) -> None:
        self._writer.put(
            PutNode(
                id=node.id,
                incarnation=node.incarnation,
                next_seq=node.next_seq,
                peer_address=node.peer_address,
                transports=node.transports,
                capacity_bytes=node.capacity_bytes,
                gone=node.gone,
                registered=node.registered,
            )
        )

    def _put_changes(
        self, location: LocationId, added: Sequence[Key], removed: Sequence[Key]
    ) -> None:
        if removed:
            self._writer.put(DropPlacements(location, removed))
        if added:
            self._writer.put(AddPlacements(location, added))


def keys_of(texts: Sequence[str]) -> list[Key]:
    """Keys of a checked message, in order."""
    return [Key(bytes.fromhex(text)) for text in texts]
