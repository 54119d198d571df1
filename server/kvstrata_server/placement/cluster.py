"""Which nodes there are, who of them is up, and what they can serve: soft state, of which the node
owns the truth.

A new incarnation starts with an empty host memory, so what the old one held there is void; what
it had put into stores survives. After `heartbeat_ttl` of silence a node is not offered, though
other nodes that share its stores are. What nodes say once they are known is `reports`'.

Where several servers share a database, what one of them is told is logged for the others
(`changes`), who `follow` it.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstrata import api
from kvstrata.errors import Expired, Malformed, Missing
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata_server.clock import Clock
from kvstrata_server.placement.batches import KeyBatch
from kvstrata_server.placement.index import HOST, LocationId
from kvstrata_server.placement.namespaces import Namespaces
from kvstrata_server.placement.places import Places, Serves
from kvstrata_server.problems import Conflict
from kvstrata_server.sql.changes import (
    Entry,
    Fenced,
    Forgotten,
    Left,
    LogEntry,
    Registered,
)
from kvstrata_server.sql.writer import Writer
from kvstrata_server.sql.writes import DropNode, PutNode, Write

__all__ = ["Cluster", "Node", "digests_of", "keys_of"]

RESERVED = frozenset({"any", "own"})
"""Sources of transfers that are no single node."""
# How long it is shown that two nodes have one id: they take it from each other in turns, and each
# tries again well within that.
_CONTESTED = 60.0
_TWO_OF_IT = "another node has this id, too, and takes its place in turns: give one another id"

log = logging.getLogger(__name__)


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
    version: str = ""
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
    rival_heard: float | None = None
    """When another node spoke in its name, last."""


class Cluster:
    """Nodes, their stores, and the index of what they hold. Not thread-safe: one event loop."""

    def __init__(
        self,
        places: Places,
        namespaces: Namespaces,
        writer: Writer,
        clock: Clock,
        heartbeat_ttl: float,
        log_as: str = "",
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.places = places
        self.index = places.index
        self.namespaces = namespaces
        self._writer = writer
        self._clock = clock
        self._ttl = heartbeat_ttl
        self.log_as = log_as
        """This server's name in the change log; empty: it has the database alone."""
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

    def note_rival(self, node_id: str, incarnation: str) -> None:
        """A heartbeat came from this incarnation. Where another one registered last, and is up,
        too, they are two nodes; else it may be its past, or the database's. Other requests may
        have been waiting here when their node died."""
        node = self.nodes.get(node_id)
        if node is None or node.incarnation == incarnation:
            return
        if self.state(node) is not api.NodeState.UP:
            return
        if not self._is_contested(node):
            log.warning(
                "node %r: incarnations %r and %r call themselves that: give one another id",
                node.id,
                node.incarnation,
                incarnation,
            )
        node.rival_heard = self._clock()

    def _is_contested(self, node: Node) -> bool:
        return node.rival_heard is not None and self._clock() - node.rival_heard < _CONTESTED

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

    def silence(self, node_id: str) -> str:
        """Why nothing is to be expected of it now, in words; empty: it is up."""
        node = self.nodes.get(node_id)
        if node is None or node.gone:
            return f"node {node_id!r} was taken out of service"
        if self.state(node) is api.NodeState.UP:
            return ""
        if node.last_seen is None:
            return f"node {node_id!r} was not heard since this server started"
        return f"node {node_id!r} was last heard {self.age(node):.0f} s ago"

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
        contested = _TWO_OF_IT if self._is_contested(node) else ""
        return api.NodeInfo(
            id=node.id,
            incarnation=node.incarnation,
            state=self.state(node),
            peer_address=node.peer_address,
            transports=list(node.transports),
            host=host,
            stores=[api.StoreRef(id=store, tier=tier) for store, tier in node.stores.items()],
            healthy=node.healthy and not contested,
            detail="; ".join(filter(None, (contested, node.detail))),
            heartbeat_age=self.age(node),
            events=list(node.events),
            version=node.version,
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
            asked.version,
        )
        writes = self.enroll(entry)
        node = self.nodes[asked.id]
        node.home = True
        self.hear(node)
        node.events = asked.events
        if self.log_as:
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
        node.version = entry.version
        return [*voided, self._row(node), *self.places.attach(node.id, node.stores)]

    def deregister(self, node_id: str, incarnation: str | None) -> Node:
        node = self.require(node_id)
        if incarnation is not None:
            self.require_current(node_id, incarnation)
        self._writer.require_room()
        writes = self.leave(node)
        if self.log_as:
            writes.append(self._logged(Left(node.id, node.incarnation)))
            writes = [Fenced(node.id, node.incarnation, writes)]
        self._writer.put(*writes)
        return node

    def leave(self, node: Node) -> list[Write]:
        """Out of service, here or at another server."""
        node.gone, node.staged = True, None
        self.places.left(node.id)
        return [*self.places.void_host(node.id), self._row(node)]

    def hear(self, node: Node) -> None:
        """It spoke to this server just now."""
        node.last_seen = node.heard_here = self._clock()
        self.heard.add(node.id)

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
            if self.log_as:
                writes.append(self._logged(Forgotten(node_id)))
            self._writer.put(*writes)
        return away

    def forget(self, node_id: str) -> list[Write]:
        """As if it had never been, here or at another server."""
        self.nodes.pop(node_id, None)
        self.heard.discard(node_id)
        return self.places.forget(node_id, self.attached)

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
        return LogEntry(self.log_as, entry)

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
