"""Where a transfer's chunks would come from, and what orchestrators are told about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvstrata.api import Outcome
from kvstrata.keys import DIGEST_BYTES, Key
from kvstrata_server.placement.cluster import Cluster, Node
from kvstrata_server.placement.held import Bools, Held
from kvstrata_server.placement.index import HOST

__all__ = ["ANY", "OWN", "Expected", "Plan", "hints", "plan"]

ANY = "any"
OWN = "own"
"""No other node: the target promotes from its own tiers."""
_MAX_SOURCES = 16
_PREFIX_BYTES = DIGEST_BYTES + 4


@dataclass(frozen=True, slots=True)
class Expected:
    """What should become of one key: `PRESENT`, `PENDING` (to be moved), `MISSING`, `NO_ROOM`.

    A source that is the target itself is one of its own stores.
    """

    outcome: Outcome
    source: str | None = None


_NO_ROOM = Expected(Outcome.NO_ROOM)


@dataclass(frozen=True, slots=True)
class Plan:
    """Sources best first, what to expect per key in request order, and in bytes what comes from
    other nodes, and what comes into the target's memory: from them, and from its own stores."""

    sources: Sequence[Node]
    expected: Sequence[Expected]
    bytes: int
    arriving: int

    @property
    def first(self) -> Node | None:
        """The best source of those that are needed."""
        needed = {each.source for each in self.expected if each.outcome is Outcome.PENDING}
        return next((source for source in self.sources if source.id in needed), None)


def plan(
    cluster: Cluster,
    keys: Sequence[Key],
    target: Node,
    source: str,
    byte_budget: int | None,
    free_only: bool = False,
) -> Plan:
    """Sources that are up and can be reached, by how much they hold, host memory first.

    `OWN` has none. A named source stays the only one, whether the index believes it holds anything
    or not. As nodes do it (`kvstrata.node.pulls`), the target's own stores come before other
    nodes, but not with `free_only`: what is brought up from them may evict.
    """
    if source == ANY:
        candidates = [n for n in cluster.up() if n is not target and n.peer_address]
    elif source == OWN:
        candidates = []
    else:
        # Unless it was forgotten meanwhile, or this server has not read of it yet.
        candidates = [cluster.nodes[source]] if source in cluster.nodes else []
    held = cluster.index.held(keys, cluster.reach([*candidates, target]))
    counts = np.bincount(held.rows, minlength=len(held.sets))
    in_host = np.array([tier == HOST for _, tier in held.places], bool)
    of_host, of_all = held.per_node(held.sets & in_host), held.per_node(held.sets)
    hosting = dict(zip(held.nodes, (counts @ of_host).tolist(), strict=True))
    holding = dict(zip(held.nodes, (counts @ of_all).tolist(), strict=True))
    ranked = sorted(
        candidates,
        key=lambda n: (not n.healthy, -hosting.get(n.id, 0), -holding.get(n.id, 0), n.id),
    )
    own = () if free_only else (target,)
    expected, moved, arriving = _within_budget(
        cluster, target, keys, _expected(held, of_host, of_all, target, own, ranked), byte_budget
    )
    if source == ANY:
        ranked = [node for node in ranked if node.id in holding][:_MAX_SOURCES]
    return Plan(ranked, expected, moved, arriving)


def _expected(
    held: Held,
    of_host: Bools,
    of_all: Bools,
    target: Node,
    own: Sequence[Node],
    ranked: Sequence[Node],
) -> list[Expected]:
    """Per key: what is in the target's host memory is there; else it comes from its stores (`own`),
    from the first that has it in its host memory, or from a store of another."""
    columns = {node: column for column, node in enumerate(held.nodes)}
    choices = [
        (target, of_host, Expected(Outcome.PRESENT)),
        *((node, of_all, Expected(Outcome.PENDING, node.id)) for node in own),
        *((node, of_host, Expected(Outcome.PENDING, node.id)) for node in ranked),
        *((node, of_all, Expected(Outcome.PENDING, node.id)) for node in ranked),
    ]
    offers = [(sets[:, columns[n.id]], what) for n, sets, what in choices if n.id in columns]
    offers.append((np.ones(len(held.sets), bool), Expected(Outcome.MISSING)))
    first = np.stack([sets for sets, _ in offers]).argmax(axis=0)
    return [offers[which][1] for which in first[held.rows].tolist()]


def _within_budget(
    cluster: Cluster,
    target: Node,
    keys: Sequence[Key],
    expected: list[Expected],
    budget: int | None,
) -> tuple[list[Expected], int, int]:
    """Also the bytes from other nodes, and all that come into the target's memory."""
    known: dict[bytes, int] = {}
    moved = total = 0
    for i, (key, each) in enumerate(zip(keys, expected, strict=True)):
        if each.outcome is Outcome.PENDING:
            prefix = key[:_PREFIX_BYTES]
            size = known.get(prefix)
            if size is None:
                size = known[prefix] = cluster.namespaces.chunk_bytes(key)
            if budget is not None and total + size > budget:
                expected[i] = _NO_ROOM
            else:
                total += size
                if each.source != target.id:
                    moved += size
    return expected, moved, total


def hints(transfer: str, keys: Sequence[Key], source: Node | None) -> dict[str, Any]:
    """What llm-d and Dynamo paste into a request; empty if no source can be reached.

    Shapes: vLLM's `remote_kv_source`, and Dynamo's router hint, whose block hashes are the last
    8 bytes of the engine's, of one group, from the root on.
    """
    address = urlsplit(source.peer_address or "") if source else None
    if address is None or not address.hostname or not address.port:
        return {}
    group = keys[0][DIGEST_BYTES:_PREFIX_BYTES]
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
            "block_hashes": [
                int.from_bytes(key[_PREFIX_BYTES:][-8:], "big")
                for key in keys
                if key[DIGEST_BYTES:_PREFIX_BYTES] == group
            ],
        },
    }
