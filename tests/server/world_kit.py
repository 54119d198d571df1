"""A cluster without a server around it: nodes join and report, and time is turned."""

from __future__ import annotations

from server_kit import TTL, TurnedClock

from kvstrata import api
from kvstrata_server.metrics import Metrics
from kvstrata_server.placement.cluster import Cluster
from kvstrata_server.placement.index import PlacementIndex
from kvstrata_server.placement.namespaces import Namespaces
from kvstrata_server.placement.places import Places
from kvstrata_server.placement.reports import Reports
from kvstrata_server.sql.writer import Writer
from kvstrata_server.tenancy.usage import Usage

NODES = {"a": ("s1", "s2"), "b": ("s1",), "c": ()}
TIERS = {"s1": "fs", "s2": "obj"}


class World:
    def __init__(self) -> None:
        self.clock = TurnedClock()
        writer = Writer(None)
        self.cluster = Cluster(Places(PlacementIndex()), Namespaces(), writer, self.clock, TTL)
        self.reports = Reports(self.cluster, writer, Metrics(), self.clock)
        self.usage = Usage(self.cluster, self.clock)
        self.seqs = dict.fromkeys(NODES, 0)

    def join(self, node: str, incarnation: str = "i1") -> None:
        self.cluster.register(
            api.NodeRegistration(
                id=node,
                incarnation=incarnation,
                stores=[api.StoreRef(id=s, tier=TIERS[s]) for s in NODES[node]],
            )
        )
        self.seqs[node] = self.cluster.nodes[node].next_seq

    def report(self, node, location="host", added=(), removed=(), namespaces=()) -> None:
        change = api.Change(
            location=location, added=[k.hex() for k in added], removed=[k.hex() for k in removed]
        )
        self.reports.report(
            node,
            api.Report(
                incarnation=self.cluster.nodes[node].incarnation,
                seq=self.seqs[node],
                changes=[change],
                namespaces=[n.document.decode() for n in namespaces],
            ),
        )
        self.seqs[node] += 1
