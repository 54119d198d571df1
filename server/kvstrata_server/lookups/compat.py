"""The questions that clients of other KV indexers ask, answered from our index.

Dynamo's indexer and Mooncake's conductor subscribe to engines and count tokens per instance. Here
nodes report, so registering an instance only gives a node another name: the one by which the
client knows the endpoint where that node publishes its KV events. As long as a client has
registered nothing for a model, nodes go by their own names.

Counts are cumulative, as theirs are: `cpu` is the prefix in host memory, `disk` what it grows to
with what comes after in any store. Of models with several groups of layers a prefix is one that
an engine can go on from (`reuse`). There is no `gpu`: what is on devices is the engines' to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from kvstrata.api import NodeState
from kvstrata.errors import Busy, Missing
from kvstrata_server.lookups.apart import apart, found
from kvstrata_server.lookups.prompts import Prompt
from kvstrata_server.lookups.reuse import reusable_in_order
from kvstrata_server.placement.cluster import Cluster
from kvstrata_server.placement.index import HOST
from kvstrata_server.problems import Conflict

__all__ = ["DEFAULT_TENANT", "Asked", "Instance", "Instances", "Overlap", "overlaps"]

DEFAULT_TENANT = "default"
_MOST_INSTANCES = 100_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's word for one data-parallel rank of an instance."""

    id: str
    model: str
    tenant: str
    rank: int
    endpoint: str
    block_size: int


@dataclass(frozen=True, slots=True)
class Instance:
    """As registered; `node` is which it is, `replay` where that gives its events again."""

    id: str
    model: str
    tenant: str
    rank: int
    endpoint: str
    replay: str
    block_size: int
    node: str


@dataclass(frozen=True, slots=True)
class Overlap:
    """Tokens from the first on: in host memory, and with what stores go on with."""

    cpu: int = 0
    disk: int = 0


class Instances:
    """What clients registered; kept in memory, as other indexers do."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._by_name: dict[tuple[str, str, str, int], Instance] = {}

    def all(self) -> list[Instance]:
        return list(self._by_name.values())

    def register(self, asked: Asked) -> None:
        """Raises `Missing` if no node publishes there, `Conflict` if the name is taken."""
        node, replay = self._node_at(asked)
        instance = Instance(
            asked.id, asked.model, asked.tenant, asked.rank, asked.endpoint, replay,
            asked.block_size, node,
        )  # fmt: skip
        name = (asked.model, asked.tenant, asked.id, asked.rank)
        known = self._by_name.get(name)
        if known is not None and (known.endpoint, known.block_size) != (
            asked.endpoint,
            asked.block_size,
        ):
            raise Conflict(
                f"instance {asked.id} rank {asked.rank} of {asked.model} is registered with "
                "another endpoint or block size: unregister it first"
            )
        if known is None and len(self._by_name) >= _MOST_INSTANCES:
            raise Busy(f"{_MOST_INSTANCES} instances are registered: unregister some")
        self._by_name[name] = instance

    def unregister(self, name: str, model: str, tenant: str | None, rank: int | None) -> None:
        """None: of all tenants, or all ranks. Raises `Missing` if there is none such."""
        gone = [
            known
            for known in self._by_name
            if (known[0], known[2]) == (model, name)
            if tenant in (None, known[1]) and rank in (None, known[3])
        ]
        if not gone:
            raise Missing(f"instance {name} of {model} is not registered")
        for known in gone:
            del self._by_name[known]

    def names(self, model: str, tenant: str) -> dict[str, list[Instance]] | None:
        """Node -> instances that it is; None if nothing is registered for the model."""
        found: dict[str, list[Instance]] = {}
        for instance in self._by_name.values():
            if (instance.model, instance.tenant) == (model, tenant):
                found.setdefault(instance.node, []).append(instance)
        return found or None

    def is_up(self, instance: Instance) -> bool:
        node = self._cluster.nodes.get(instance.node)
        return node is not None and self._cluster.state(node) is NodeState.UP

    def _node_at(self, asked: Asked) -> tuple[str, str]:
        """The node, and where it replays: its own word, for we are going to connect there."""
        known = []
        for node in self._cluster.nodes.values():
            for at in node.events:
                if at.endpoint == asked.endpoint:
                    return node.id, at.replay
                known.append(at.endpoint)
        named = self._cluster.nodes.get(asked.id)
        if named is not None:
            return named.id, next((at.replay for at in named.events), "")
        raise Missing(
            f"no node publishes KV events at {asked.endpoint}, and none is called {asked.id}: "
            f"they publish at {sorted(known)[:20]} (`events` of a node's settings)"
        )


async def overlaps(cluster: Cluster, prompts: Iterable[Prompt]) -> dict[str, Overlap]:
    """Per node that is up what it has of the best of these, in tokens. Between two of them others
    have their turns."""
    best: dict[str, Overlap] = {}
    for prompt in prompts:
        batch = await apart(len(prompt), partial(prompt.batch, cluster.index.families))
        held = await found(cluster.index, batch, cluster.reach_up())
        step = prompt.chain.rule.step
        reused = await apart(
            len(held) * len(held.places), partial(reusable_in_order, prompt.chain, held, HOST)
        )
        for node, (cpu, disk) in reused.items():
            if disk * step > best.get(node, Overlap()).disk:
                best[node] = Overlap(cpu * step, disk * step)
        await asyncio.sleep(0)
    return best
