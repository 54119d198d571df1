"""Where a transfer's chunks would come from, and what orchestrators are told about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvstrata.api import Outcome
from kvstrata.keys import Key, split_key
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.placement.index import HOST, Holders

__all__ = ["ANY", "OWN", "Expected", "Plan", "hints", "plan"]

ANY = "any"
OWN = "own"
"""No other node: the target promotes from its own tiers."""
_MAX_SOURCES = 16


@dataclass(frozen=True, slots=True)
class Expected:
    """What should become of one key: `PRESENT`, `PENDING` (to be moved), `MISSING`, `NO_ROOM`.

    A source that is the target itself is one of its own stores.
    """

    outcome: Outcome
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Sources best first, what to expect per key in request order, and the bytes to move."""

    sources: Sequence[Node]
    expected: Sequence[Expected]
    bytes: int


def plan(
    cluster: Cluster, keys: Sequence[Key], target: Node, source: str, byte_budget: int | None
) -> Plan:
    """Sources that are up and can be reached, by how much they hold, host memory first.

    `OWN` has none. A named source stays the only one, whether the index believes it holds anything
    or not.
    """
    if source == ANY:
        candidates = [n for n in cluster.up() if n is not target and n.peer_address]
    elif source == OWN:
        candidates = []
    else:
        # Unless it was forgotten meanwhile, or this server has not read of it yet.
        candidates = [cluster.nodes[source]] if source in cluster.nodes else []
    holders = cluster.index.holders(keys)
    reach = cluster.reach([*candidates, target])
    served: dict[Holders, dict[str, bool]] = {}
    in_host: Counter[str] = Counter()
    in_all: Counter[str] = Counter()
    for held, count in Counter(holders).items():
        nodes: dict[str, bool] = {}
        for node, tier in (pair for location in held for pair in reach.get(location, ())):
            nodes[node] = nodes.get(node, False) or tier == HOST
        served[held] = nodes
        for node, host in nodes.items():
            in_host[node] += count * host
            in_all[node] += count
    ranked = sorted(candidates, key=lambda n: (not n.healthy, -in_host[n.id], -in_all[n.id], n.id))
    chosen = {held: _choose(nodes, ranked, target, candidates) for held, nodes in served.items()}
    expected, size = _within_budget(cluster, keys, [chosen[held] for held in holders], byte_budget)
    if source == ANY:
        ranked = [node for node in ranked if in_all[node.id]][:_MAX_SOURCES]
    return Plan(ranked, expected, size)


def _choose(
    nodes: Mapping[str, bool], ranked: Sequence[Node], target: Node, candidates: Sequence[Node]
) -> Expected:
    if nodes.get(target.id):
        return Expected(Outcome.PRESENT)
    for node in ranked:
        if nodes.get(node.id):
            return Expected(Outcome.PENDING, node.id)
    for node in (target, *ranked):
        if node.id in nodes:
            return Expected(Outcome.PENDING, node.id)
    return Expected(Outcome.MISSING)


def _within_budget(
    cluster: Cluster, keys: Sequence[Key], expected: list[Expected], budget: int | None
) -> tuple[list[Expected], int]:
    total = 0
    for i, (key, each) in enumerate(zip(keys, expected, strict=True)):
        if each.outcome is Outcome.PENDING:
            size = cluster.namespaces.chunk_bytes(key)
            if budget is not None and total + size > budget:
                expected[i] = Expected(Outcome.NO_ROOM)
            else:
                total += size
    return expected, total


def hints(transfer: str, keys: Sequence[Key], source: Node | None) -> dict[str, Any]:
    """What llm-d and Dynamo paste into a request; empty if no source can be reached.

    Shapes: vLLM's `remote_kv_source`, and Dynamo's router hint, whose block hashes are the last
    8 bytes of the engine's, of one group, from the root on.
    """
    address = urlsplit(source.peer_address or "") if source else None
    if address is None or not address.hostname or not address.port:
        return {}
    group = split_key(keys[0]).group
    parts = (split_key(key) for key in keys)
    return {
        "kv_transfer_params": {
            "remote_kv_source": {
                "kv_request_id": transfer,
                "remote_host": address.hostname,
                "remote_port": address.port,
            }
        },
        "router_hint": {
            "source_control_endpoint": source.peer_address if source else "",
            "block_hashes": [int.from_bytes(p.hash[-8:], "big") for p in parts if p.group == group],
        },
    }
