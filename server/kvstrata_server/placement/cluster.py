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

Where several servers share a database, what one of them is told is logged for the others
(`changes`), who `follow` it. One that a node has just come to may not have read all that the one
before wrote, so it waits `_LAG` before it takes a node that is ahead for one that lost something.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstrata import api
from kvstrata.bulk import BulkChange, BulkReport
from kvstrata.errors import Busy, Expired, Malformed, Missing
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata_server.access.no_nul import namespace_of
from kvstrata_server.clock import Clock
from kvstrata_server.metrics import Metrics
from kvstrata_server.placement.batches import KeyBatch, joined
from kvstrata_server.placement.index import HOST, LocationId
from kvstrata_server.placement.namespaces import Namespaces
from kvstrata_server.placement.places import PlaceChange, Places, Serves
from kvstrata_server.problems import Conflict
from kvstrata_server.sql.changes import (
    Entry,
    Fenced,
    Forgotten,
    Left,
    LogEntry,
    Registered,
    Reported,
)
from kvstrata_server.sql.writer import Writer
from kvstrata_server.sql.writes import DropNode, PutNode, SetSeq, Write

__all__ = ["Cluster", "Node", "digests_of", "keys_of"]

# How far behind each other servers that share a database may be, seconds.
_LAG = 2.0


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
    ailing: Sequence[str] = ()
    """Stores that are in trouble there."""
    events: Sequence[api.EventsAt] = ()
    snapshot_wanted: bool = False
    staged: dict[LocationId, list[KeyBatch]] | None = None
    """Parts of a snapshot that is not complete."""
    home: bool = False
    """Whether its last report or registration came to this server."""
    heard_here: float = 0.0
    """When it last spoke to this server; `last_seen` is when it did to any."""
    drain: api.DrainState | None = None
    """Of the drain in force."""
    ahead: tuple[int, float] | None = None
    """The node's count when it was found to be ahead of this server's, and when that was."""


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
        log_as: str = "",
    ) -> None:
        """`log_as`: this server's name in the change log; empty: it has the database alone."""
        self.nodes: dict[str, Node] = {}
        self.places = places
        self.index = places.index
        self.namespaces = namespaces
        self._writer = writer
        self._metrics = metrics
        self._clock = clock
        self._ttl = heartbeat_ttl
        self._log_as = log_as
        self.heard: set[str] = set()
        """Nodes that spoke to this server since they were taken (`take_heard`)."""
        self._started = clock()

    def clear(self) -> None:
        """Know nothing, before everything is loaded again."""
        self.nodes.clear()
        self.places.clear()
        self.heard.clear()
        self._started = self._clock()

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

    def require_target(self, node_id: str) -> Node:
        """Raises `Conflict` also for a node that is drained."""
        node = self.require(node_id)
        if node.drain is not None:
            raise Conflict(
                f"node {node_id!r} is drained and takes no new chunks: choose another target, or "
                f"cancel that (DELETE /v1/nodes/{node_id}/drain)"
            )
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

    @property
    def ttl(self) -> float:
        """Seconds without a heartbeat after which a node is silent."""
        return self._ttl

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

    def awaited(self) -> list[Node]:
        """Those not heard since this server started, while that may be for no other reason than
        that it did."""
        if self._clock() - self._started > self._ttl:
            return []
        return [n for n in self.nodes.values() if n.last_seen is None and not n.gone]

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
            events=list(node.events),
            drain=node.drain,
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
        entry = Registered(
            asked.id,
            asked.incarnation,
            self._clock(),
            asked.peer_address,
            asked.transports,
            asked.capacity_bytes,
            stores,
        )
        writes = self.enroll(entry)
        node = self.nodes[asked.id]
        node.home = True
        self._hear(node)
        node.events = asked.events
        if self._log_as:
            writes.append(self._logged(entry))
            writes = [Fenced(node.id, node.incarnation, writes, registered=entry.registered)]
        self._writer.put(*writes)
        return api.RegistrationReply(
            node=node.id,
            incarnation=node.incarnation,
            heartbeat_ttl=self._ttl,
            next_seq=node.next_seq,
        )

    def enroll(self, entry: Registered) -> list[Write]:
        """A registration, here or at another server."""
        voided: list[Write] = []
        node = self.nodes.get(entry.node)
        if node is None:
            node = self.nodes[entry.node] = Node(entry.node, entry.incarnation)
        elif node.incarnation != entry.incarnation:
            voided = self.places.void_host(node.id)
            node.incarnation = entry.incarnation
            node.next_seq, node.staged, node.snapshot_wanted = 0, None, False
            node.host = node.ahead = node.drain = None
        elif node.gone:
            node.snapshot_wanted = True
        node.peer_address = entry.peer_address
        node.transports = tuple(entry.transports)
        node.capacity_bytes = entry.capacity_bytes
        node.gone, node.healthy, node.detail, node.ailing = False, True, "", ()
        node.registered = entry.registered
        node.stores = dict(entry.stores)
        return [*voided, self._row(node), *self.places.attach(node.id, node.stores)]

    def deregister(self, node_id: str, incarnation: str | None) -> Node:
        node = self.require(node_id)
        if incarnation is not None:
            self.require_current(node_id, incarnation)
        self._writer.require_room()
        writes = self.leave(node)
        if self._log_as:
            writes.append(self._logged(Left(node.id, node.incarnation)))
            writes = [Fenced(node.id, node.incarnation, writes)]
        self._writer.put(*writes)
        return node

    def leave(self, node: Node) -> list[Write]:
        """Out of service, here or at another server."""
        node.gone, node.staged = True, None
        self.places.left(node.id)
        return [*self.places.void_host(node.id), self._row(node)]

    def heartbeat(self, node_id: str, beat: api.HeartbeatRequest) -> api.HeartbeatReply:
        node = self.require_current(node_id, beat.incarnation)
        self._hear(node)
        node.host, node.healthy, node.detail = beat.host, beat.healthy, beat.detail
        node.ailing = beat.ailing
        if beat.events is not None:
            node.events = beat.events
        if beat.next_seq is not None and self._lost(node, beat.next_seq):
            node.staged, node.snapshot_wanted = None, True
        return api.HeartbeatReply(snapshot_wanted=node.snapshot_wanted)

    def _hear(self, node: Node) -> None:
        node.last_seen = node.heard_here = self._clock()
        self.heard.add(node.id)

    def _lost(self, node: Node, next_seq: int) -> bool:
        """Whether reports of the node were lost: it is at `next_seq`, and this server is not."""
        if next_seq <= node.next_seq:
            node.ahead = None
            return False
        if node.home or not self._log_as:
            return True
        if node.ahead is None or node.next_seq >= node.ahead[0]:
            node.ahead = next_seq, self._clock()
        return self._clock() - node.ahead[1] > _LAG

    def forget_old(self, retention: float) -> list[str]:
        """Remove nodes that have been away for longer; returns their ids.

        What they put into stores that others have attached is still offered by those.
        """
        now = self._clock()
        away = [
            node.id
            for node in self.nodes.values()
            if now - max(node.last_seen or 0.0, node.registered, self._started) > retention
        ]
        for node_id in away:
            writes = [*self.forget(node_id), DropNode(node_id)]
            if self._log_as:
                writes.append(self._logged(Forgotten(node_id)))
            self._writer.put(*writes)
        return away

    def forget(self, node_id: str) -> list[Write]:
        """As if it had never been, here or at another server."""
        self.nodes.pop(node_id, None)
        self.heard.discard(node_id)
        return self.places.forget(node_id, self.attached)

    # ------------------------------------------------------------ placements

    def report(self, node_id: str, report: api.Report | BulkReport) -> api.ReportReply:
        node = self.require_current(node_id, report.incarnation)
        if report.seq < node.next_seq:
            self._metrics.reports.labels("repeated").inc()
        elif not self._continues(node, report):
            if report.seq > node.next_seq and not self._lost(node, report.seq):
                raise Busy(
                    f"node {node.id!r} comes from another server, whose last words about it are "
                    "not read yet: send this again in a moment"
                )
            node.staged, node.snapshot_wanted = None, True
            self._metrics.reports.labels("gap").inc()
        else:
            self._apply(node, report)
            self._metrics.reports.labels("applied").inc()
            return api.ReportReply(applied=True, next_seq=node.next_seq)
        self._hear(node)
        return api.ReportReply(
            applied=False, next_seq=node.next_seq, snapshot_wanted=node.snapshot_wanted
        )

    @staticmethod
    def _continues(node: Node, report: api.Report | BulkReport) -> bool:
        if report.snapshot in ("first", "only"):
            return True
        if report.seq != node.next_seq:
            return False
        if report.snapshot == "no":
            return node.staged is None and not node.snapshot_wanted
        return node.staged is not None

    def _apply(self, node: Node, report: api.Report | BulkReport) -> None:
        """All of it or, if something is wrong with the report, nothing."""
        changes = self._changes(node, report)
        documents = [namespace_of(document) for document in report.namespaces]
        self._writer.require_room()
        writes = self.namespaces.learn(documents)
        mentioned = [self.index.families.namespaces(change.added) for change in changes]
        writes += self.namespaces.mention(set().union(*mentioned))
        node.next_seq = report.seq + 1
        node.home, node.ahead = True, None
        self._hear(node)
        if report.snapshot == "no":
            placed = self.places.apply(changes)
            self._put(node, report.namespaces, writes, placed, changes, snapshot=False)
            return
        if node.staged is None or report.snapshot in ("first", "only"):
            node.staged = {}  # for `more` and `last` it is there: see _continues
        for change in changes:
            node.staged.setdefault(change.location, []).append(change.added)
        if report.snapshot in ("first", "more"):
            # Not the number: half of a snapshot is worth nothing after a restart.
            self._writer.put(*writes)
            return
        held = {location: joined(parts) for location, parts in node.staged.items()}
        node.staged, node.snapshot_wanted = None, False
        placed = self.places.replace(node.id, held, self.attached, rewrite=bool(self._log_as))
        nothing = self.index.families.of_keys(())
        whole = [PlaceChange(location, keys, nothing) for location, keys in held.items()]
        self._put(node, report.namespaces, writes, placed, whole, snapshot=True)

    def _put(
        self,
        node: Node,
        documents: Sequence[str],
        writes: list[Write],
        placed: list[Write],
        changes: Sequence[PlaceChange],
        snapshot: bool,
    ) -> None:
        """As one change, with the number of the report."""
        placed.append(SetSeq(node.id, node.incarnation, node.next_seq))
        if self._log_as:
            runs = self.index.families.runs
            entry = Reported(
                node.id,
                node.incarnation,
                node.next_seq,
                snapshot,
                [
                    BulkChange(self._name(c.location), runs(c.added), runs(c.removed))
                    for c in changes
                ],
                list(documents),
            )
            placed.append(self._logged(entry))
            placed = [Fenced(node.id, node.incarnation, placed, next_seq=node.next_seq)]
        self._writer.put(*writes, *placed)

    def _changes(self, node: Node, report: api.Report | BulkReport) -> list[PlaceChange]:
        families = self.index.families
        if isinstance(report, BulkReport):
            return [
                PlaceChange(
                    self._location(node, change.location),
                    families.of_runs(change.added),
                    families.of_runs(change.removed),
                )
                for change in report.changes
            ]
        return [
            PlaceChange(
                self._location(node, change.location),
                families.of_hex(change.added),
                families.of_hex(change.removed),
            )
            for change in report.changes
        ]

    def _name(self, location: LocationId) -> str:
        return self.places.describe(location)[1] or HOST

    def _location(self, node: Node, name: str) -> LocationId:
        store = None if name == HOST else name
        if store is not None and store not in node.stores:
            raise Malformed(
                f"node {node.id!r} reports about {name!r}, which is neither {HOST!r} nor one of "
                f"the stores it registered: {sorted(node.stores)}"
            )
        return self.places.location(node.id, store)

    def reach(self, among: Iterable[Node]) -> Serves:
        """Which of these nodes can serve what lies at each location, and as which tier."""
        return self.places.reach({node.id: node.stores for node in among}.get)

    def reach_up(self, among: Container[str] | None = None) -> Serves:
        """The same of all nodes that are up, or of those with these ids."""

        def stores_of(node_id: str) -> Mapping[str, str] | None:
            node = self.nodes.get(node_id)
            if node is None or (among is not None and node_id not in among):
                return None
            return node.stores if self.state(node) is api.NodeState.UP else None

        return self.places.reach(stores_of)

    def attached(self, node_id: str, store: str) -> bool:
        node = self.nodes.get(node_id)
        return node is not None and not node.gone and store in node.stores

    def take_heard(self) -> set[str]:
        """Nodes that spoke since the last call."""
        heard, self.heard = self.heard, set()
        return heard

    def _logged(self, entry: Entry) -> Write:
        return LogEntry(self._log_as, entry)

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


def digests_of(texts: Iterable[str]) -> set[bytes]:
    """Of the namespaces that keys of a checked message are of."""
    return {bytes.fromhex(digest) for digest in {text[: 2 * DIGEST_BYTES] for text in texts}}


def keys_of(texts: Sequence[str]) -> list[Key]:
    """Keys of a checked message, in order."""
    return [Key(bytes.fromhex(text)) for text in texts]
