"""Answers to `POST /v1/placements:lookup`, from the index alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvstrata import api
from kvstrata.bulk import BulkLookup
from kvstrata.keys import Key
from kvstrata_server.batches import KeyBatch
from kvstrata_server.cluster import Cluster, Node
from kvstrata_server.hot import HotPrefixes
from kvstrata_server.index import HOST, Reach, Tallied
from kvstrata_server.metrics import Metrics

__all__ = ["look_up"]


def look_up(
    cluster: Cluster, metrics: Metrics, hot: HotPrefixes, asked: api.LookupRequest | BulkLookup
) -> api.LookupReply:
    """What each node that is up could serve of the keys, best node first."""
    families = cluster.index.families
    if isinstance(asked, BulkLookup):
        keys = families.of_runs(asked.keys, intern=False)
    else:
        keys = families.of_hex(asked.keys, intern=False)
    reach = cluster.reach_up(None if asked.nodes is None else frozenset(asked.nodes))
    tallied = cluster.index.tally(keys, reach)
    nodes = [_placement(cluster, cluster.nodes[node], t) for node, t in tallied.items()]
    if asked.mode == "all":
        held = _held(cluster, keys, _texts(asked), reach)
        for node in nodes:
            node.keys = held[node.node]
    nodes.sort(key=lambda n: _rank(n, asked.mode))
    metrics.lookup_keys.inc(len(keys))
    longest = max((n.prefix for n in nodes), default=0)
    metrics.lookup_hits.inc(longest)
    if longest and asked.mode == "prefix":
        last = _key_at(asked, longest - 1)
        hot.found(last, longest, sum(n.prefix == longest for n in nodes))
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


def _rank(node: api.NodePlacement, mode: Literal["prefix", "all"]) -> tuple[int, int, float, str]:
    host = node.tiers.get(HOST, api.Tally(found=0, prefix=0))
    if mode == "all":
        return -len(node.keys or ()), -host.found, node.age, node.node
    return -node.prefix, -host.prefix, node.age, node.node


def _held(
    cluster: Cluster, keys: KeyBatch, texts: Sequence[str], reach: Reach
) -> dict[str, list[str]]:
    held: dict[str, list[str]] = {}
    for text, holders in zip(texts, cluster.index.holders(keys), strict=True):
        for node in {node for location in holders for node, _ in reach.get(location, ())}:
            held.setdefault(node, []).append(text)
    return held


def _texts(asked: api.LookupRequest | BulkLookup) -> Sequence[str]:
    if isinstance(asked, api.LookupRequest):
        return asked.keys
    return [key.hex() for run in asked.keys for key in run.each()]


def _key_at(asked: api.LookupRequest | BulkLookup, position: int) -> Key:
    if isinstance(asked, api.LookupRequest):
        return Key(bytes.fromhex(asked.keys[position]))
    for run in asked.keys:
        if position < len(run):
            return run[position]
        position -= len(run)
    raise IndexError(position)
