"""Answers to `POST /v1/placements:lookup`, from the index alone."""

from __future__ import annotations

from kvstrata import api
from kvstrata_server.cluster import Cluster, Node, keys_of
from kvstrata_server.index import HOST, Reach, Tallied
from kvstrata_server.metrics import Metrics

__all__ = ["look_up"]


def look_up(cluster: Cluster, metrics: Metrics, asked: api.LookupRequest) -> api.LookupReply:
    """What each node that is up could serve of the keys, best node first."""
    keys = keys_of(asked.keys)
    among = cluster.up()
    if asked.nodes is not None:
        wanted = set(asked.nodes)
        among = [node for node in among if node.id in wanted]
    reach = cluster.reach(among)
    tallied = cluster.index.tally(keys, reach)
    nodes = [_placement(cluster, cluster.nodes[node], t) for node, t in tallied.items()]
    if asked.mode == "all":
        held = _held(cluster, asked.keys, reach)
        for node in nodes:
            node.keys = held[node.node]
    nodes.sort(key=lambda n: _rank(n, asked.mode == "all"))
    metrics.lookup_keys.inc(len(keys))
    metrics.lookup_hits.inc(max((n.prefix for n in nodes), default=0))
    return api.LookupReply(keys=len(keys), nodes=nodes)


def _placement(cluster: Cluster, node: Node, tallied: Tallied) -> api.NodePlacement:
    return api.NodePlacement(
        node=node.id,
        incarnation=node.incarnation,
        prefix=tallied.prefix,
        tiers={
            tier: api.Tally(found=found, prefix=prefix)
            for tier, (found, prefix) in sorted(tallied.tiers.items())
        },
        age=cluster.age(node),
    )


def _rank(node: api.NodePlacement, whole: bool) -> tuple[int, int, float, str]:
    host = node.tiers.get(HOST, api.Tally(found=0, prefix=0))
    if whole:
        return -len(node.keys or ()), -host.found, node.age, node.node
    return -node.prefix, -host.prefix, node.age, node.node


def _held(cluster: Cluster, asked: list[str], reach: Reach) -> dict[str, list[str]]:
    held: dict[str, list[str]] = {}
    for text, holders in zip(asked, cluster.index.holders(keys_of(asked)), strict=True):
        for node in {node for location in holders for node, _ in reach.get(location, ())}:
            held.setdefault(node, []).append(text)
    return held
