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
from kvstrata_server.index import HOST, LocationId
from kvstrata_server.metrics import Metrics
from kvstrata_server.namespaces import Namespaces
from kvstrata_server.places import PlaceChange, Places
from kvstrata_server.writer import Writer
from kvstrata_server.writes import PutNode, SetSeq, Write

__all__ = ["Cluster", "Node", "keys_of"]


RESERVED = frozenset({"any", "own"})
"""Sources of transfers that are no single node."""


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
        places: Places,
        namespaces: Namespaces,
        writer: Writer,
        metrics: Metrics,
        clock: Clock,
        heartbeat_ttl: float,
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.places = places
        self.index = places.index
        self.namespaces = namespaces
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._ttl = heartbeat_ttl

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
        if asked.id in RESERVED:
            raise Malformed(f"a node can't be named {asked.id!r}: transfers mean others by it")
        self._writer.require_room()
        voided: list[Write] = []
        node = self.nodes.get(asked.id)
        if node is None:
            node = self.nodes[asked.id] = Node(asked.id, asked.incarnation)
        elif node.incarnation != asked.incarnation:
            voided = self.places.void_host(node.id)
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
        node.stores = stores
        self._writer.put(*voided, self._row(node), *self.places.attach(node.id, stores))
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
        self._writer.require_room()
        node.gone, node.staged = True, None
        self._writer.put(*self.places.void_host(node.id), self._row(node))
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
            PlaceChange(
                self._location(node, change.location),
                keys_of(change.added),
                keys_of(change.removed),
            )
            for change in report.changes
        ]
        documents = [Namespace.parse(document.encode()) for document in report.namespaces]
        self._writer.require_room()
        writes = self.namespaces.learn(documents)
        writes += self.namespaces.mention(key for change in changes for key in change.added)
        node.next_seq = report.seq + 1
        node.last_seen = self._clock()
        if report.snapshot == "no":
            writes += self.places.apply(changes)
        else:
            if node.staged is None or report.snapshot in ("first", "only"):
                node.staged = {}  # for `more` and `last` it is there: see _continues
            for change in changes:
                node.staged.setdefault(change.location, set()).update(change.added)
            if report.snapshot in ("last", "only"):
                writes += self.places.replace(node.id, node.staged, self._attached)
                node.staged, node.snapshot_wanted = None, False
        if node.staged is None:
            # Not between the parts of a snapshot: half of one is worth nothing after a restart.
            writes.append(SetSeq(node.id, node.incarnation, node.next_seq))
        self._writer.put(*writes)

    def _location(self, node: Node, name: str) -> LocationId:
        store = None if name == HOST else name
        if store is not None and store not in node.stores:
            raise Malformed(
                f"node {node.id!r} reports about {name!r}, which is neither {HOST!r} nor one of "
                f"the stores it registered: {sorted(node.stores)}"
            )
        return self.places.location(node.id, store)

    def reach(self, among: Iterable[Node]) -> dict[LocationId, list[tuple[str, str]]]:
        """Which of these nodes can serve what lies at each location, and as which tier."""
        return self.places.reach((node.id, node.stores) for node in among)

    def _attached(self, node_id: str, store: str) -> bool:
        node = self.nodes[node_id]
        return not node.gone and store in node.stores

    def _row(self, node: Node) -> PutNode:
        return PutNode(
            id=node.id,
            incarnation=node.incarnation,
            next_seq=node.next_seq,
            peer_address=node.peer_address,
            transports=node.transports,
            capacity_bytes=node.capacity_bytes,
            gone=node.gone,
            registered=node.registered,
        )


def keys_of(texts: Sequence[str]) -> list[Key]:
    """Keys of a checked message, in order."""
    return [Key(bytes.fromhex(text)) for text in texts]
