"""What nodes say of themselves: heartbeats, and reports of what changed, in numbered batches.

What keeps the index equal to the node:

    report arrives with             then
    seq already applied             ignored (a repetition after a lost answer)
    the expected seq                applied
    a later seq                     nothing is applied until a snapshot comes
    a snapshot's first part         accepted at any seq from the expected one on
    a snapshot's last part          what was known of this node is replaced by its parts
    an incarnation of the past      `Expired`; of an unknown node: `Missing` (it registers again)

`next_seq` is stored with each batch, in one transaction with the placements it covers. So after
a restart, however it came about, a node that reported something SQL missed is seen to be ahead
and asked for a snapshot, while those that SQL has entirely just go on: asking all of them would
make every deployment of a new version cost a report of all chunks of the cluster.

Of servers that share a database, one that a node has just come to may not have read all that the
one before wrote, so it waits `_LAG` before it takes a node that is ahead for one that lost
something.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata import api
from kvstrata.bulk import BulkChange, BulkReport
from kvstrata.errors import Busy, Malformed
from kvstrata.keys import Namespace
from kvstrata_server.access.no_nul import namespace_of
from kvstrata_server.clock import Clock
from kvstrata_server.metrics import Metrics
from kvstrata_server.placement.batches import joined
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.placement.index import HOST, LocationId
from kvstrata_server.placement.places import PlaceChange
from kvstrata_server.sql.changes import Fenced, LogEntry, Reported
from kvstrata_server.sql.writer import Writer
from kvstrata_server.sql.writes import SetSeq, Write

__all__ = ["Reports"]

# How far behind each other servers that share a database may be, seconds.
_LAG = 2.0


class Reports:
    """Brings what nodes say into a cluster. Not thread-safe: one event loop."""

    def __init__(self, cluster: Cluster, writer: Writer, metrics: Metrics, clock: Clock) -> None:
        self._cluster = cluster
        self._places = cluster.places
        self._families = cluster.index.families
        self._writer = writer
        self._metrics = metrics
        self._clock = clock

    def heartbeat(self, node_id: str, beat: api.HeartbeatRequest) -> api.HeartbeatReply:
        """Raises `Missing`, `Expired`."""
        self._cluster.note_rival(node_id, beat.incarnation)
        node = self._cluster.require_current(node_id, beat.incarnation)
        self._cluster.hear(node)
        node.host, node.healthy, node.detail = beat.host, beat.healthy, beat.detail
        node.ailing = beat.ailing
        if beat.events is not None:
            node.events = beat.events
        node.version = beat.version or node.version
        if beat.next_seq is not None and self._lost(node, beat.next_seq):
            node.staged, node.snapshot_wanted = None, True
        return api.HeartbeatReply(snapshot_wanted=node.snapshot_wanted)

    def report(self, node_id: str, report: api.Report | BulkReport) -> api.ReportReply:
        """Raises `Missing`, `Expired`, `Malformed`, `Busy`; then nothing has changed."""
        node = self._cluster.require_current(node_id, report.incarnation)
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
        self._cluster.hear(node)
        return api.ReportReply(
            applied=False, next_seq=node.next_seq, snapshot_wanted=node.snapshot_wanted
        )

    def follow(self, entry: Reported) -> None:
        """A report to another server. Older news than the cluster has is left aside. Raises
        `Malformed` on documents that this version can't read."""
        node = self._cluster.nodes.get(entry.node)
        if node is None or node.incarnation != entry.incarnation:
            return
        if entry.next_seq <= node.next_seq:
            return
        of_runs, known = self._families.of_runs, self._places.locations(node.id)
        changes = [
            PlaceChange(location, of_runs(change.added), of_runs(change.removed))
            for change in entry.changes
            if (location := known.get(None if change.location == HOST else change.location))
            is not None
        ]
        self._learn([Namespace.parse(text.encode()) for text in entry.namespaces], changes)
        if entry.snapshot:
            held = {change.location: change.added for change in changes}
            self._places.replace(node.id, held, self._cluster.attached)
            node.snapshot_wanted = False
        else:
            self._places.apply(changes)
        node.next_seq, node.staged, node.home = entry.next_seq, None, False

    # ------------------------------------------------------------ is it what comes next

    def _lost(self, node: Node, next_seq: int) -> bool:
        """Whether reports of the node were lost: it is at `next_seq`, and this server is not."""
        if next_seq <= node.next_seq:
            node.ahead = None
            return False
        if node.home or not self._cluster.log_as:
            return True
        if node.ahead is None or node.next_seq >= node.ahead[0]:
            node.ahead = next_seq, self._clock()
        return self._clock() - node.ahead[1] > _LAG

    @staticmethod
    def _continues(node: Node, report: api.Report | BulkReport) -> bool:
        if report.snapshot in ("first", "only"):
            return True
        if report.seq != node.next_seq:
            return False
        if report.snapshot == "no":
            return node.staged is None and not node.snapshot_wanted
        return node.staged is not None

    # ------------------------------------------------------------ applying it

    def _apply(self, node: Node, report: api.Report | BulkReport) -> None:
        """All of it or, if something is wrong with the report, nothing."""
        changes = self._changes(node, report)
        documents = [namespace_of(document) for document in report.namespaces]
        self._writer.require_room()
        writes = self._learn(documents, changes)
        node.next_seq = report.seq + 1
        node.home, node.ahead = True, None
        self._cluster.hear(node)
        if report.snapshot == "no":
            placed = self._places.apply(changes)
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
        rewrite = bool(self._cluster.log_as)
        placed = self._places.replace(node.id, held, self._cluster.attached, rewrite)
        nothing = self._families.of_keys(())
        whole = [PlaceChange(location, keys, nothing) for location, keys in held.items()]
        self._put(node, report.namespaces, writes, placed, whole, snapshot=True)

    def _learn(self, documents: Sequence[Namespace], changes: Sequence[PlaceChange]) -> list[Write]:
        namespaces = self._cluster.namespaces
        writes = namespaces.learn(documents)
        mentioned = [self._families.namespaces(change.added) for change in changes]
        return writes + namespaces.mention(set().union(*mentioned))

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
        if self._cluster.log_as:
            runs = self._families.runs
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
            placed.append(LogEntry(self._cluster.log_as, entry))
            placed = [Fenced(node.id, node.incarnation, placed, next_seq=node.next_seq)]
        self._writer.put(*writes, *placed)

    def _changes(self, node: Node, report: api.Report | BulkReport) -> list[PlaceChange]:
        families = self._families
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
        return self._places.describe(location)[1] or HOST

    def _location(self, node: Node, name: str) -> LocationId:
        store = None if name == HOST else name
        if store is not None and store not in node.stores:
            raise Malformed(
                f"node {node.id!r} reports about {name!r}, which is neither {HOST!r} nor one of "
                f"the stores it registered: {sorted(node.stores)}"
            )
        return self._places.location(node.id, store)
