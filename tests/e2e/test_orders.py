"""What an operator or a router asks of nodes by REST, carried out by real ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster_kit import NAMESPACE, TOKEN, Cluster, key, payload, read, started, stored, write

from kvstrata.api import (
    EvictionInfo,
    EvictionRequest,
    EvictionState,
    LeaseInfo,
    LookupRequest,
    OfKeys,
    OfModel,
)
from kvstrata.client import Client
from kvstrata.testing.waiting import eventually


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with started(tmp_path) as cluster:
        yield cluster


def ended(cluster: Cluster, chunks: OfKeys | OfModel, **where: object) -> EvictionInfo:
    made = cluster.control.create_eviction(EvictionRequest(chunks=chunks, **where))
    found: EvictionInfo = eventually(
        lambda: (e := cluster.control.eviction(made.id)).state.ended and e
    )
    assert found.state is EvictionState.DONE, found
    return found


def of(numbers: range) -> OfKeys:
    return OfKeys(keys=[key(n).hex() for n in numbers])


def held(client: Client) -> dict[str, int]:
    return {tier.name: tier.chunks for tier in client.status().tiers if tier.name != "peer"}


@pytest.mark.timeout(240)
def test_chunks_go_from_where_they_are_told_to(cluster: Cluster) -> None:
    with cluster.connect("a") as a, cluster.connect("b") as b:
        for client in (a, b):
            write(client, range(0, 8))
            eventually(lambda client=client: stored(client, 8))
        eventually(
            lambda: cluster.reported("a", range(0, 8)) and cluster.reported("b", range(0, 8))
        )

        host = ended(cluster, of(range(4)), nodes=["a"], tiers=["host"])
        assert [(n.node, n.dropped) for n in host.nodes] == [("a", {"host": 4})]
        assert held(a) == {"host": 4, "fs": 8}
        assert held(b) == {"host": 8, "fs": 8}
        assert read(a, range(0, 8)) == [payload(n) for n in range(8)]  # from the disk

        gone = ended(cluster, OfModel(model=NAMESPACE.model))
        assert {n.node for n in gone.nodes} == {"a", "b"}
        assert all(set(n.dropped or {}) == {"host", "fs"} for n in gone.nodes)
        assert held(a) == held(b) == {"host": 0, "fs": 0}
        assert read(a, range(0, 8)) == []
        asked = LookupRequest(keys=[key(0).hex()])
        eventually(lambda: cluster.control.lookup(asked).nodes == [])

        write(a, range(0, 2))  # nothing keeps it from being computed anew
        assert read(a, range(0, 2)) == [payload(n) for n in range(2)]


@pytest.mark.timeout(240)
def test_a_lease_keeps_chunks_from_eviction_until_it_is_released(cluster: Cluster) -> None:
    url = f"http://127.0.0.1:{cluster.port}"
    keys = [key(n).hex() for n in range(4)]
    with (
        cluster.connect("a") as a,
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as http,
    ):
        write(a, range(0, 4))
        eventually(lambda: stored(a, 4))
        eventually(lambda: cluster.reported("a", range(0, 4)))
        ended(cluster, OfKeys(keys=keys), nodes=["a"], tiers=["host"])
        assert held(a)["host"] == 0

        made = http.post("/v1/leases", json={"node": "a", "keys": keys, "ttl": 600})
        at = f"/v1/leases/{made.json()['id']}"

        def lease() -> LeaseInfo:
            return LeaseInfo.model_validate_json(http.get(at).content)

        eventually(lambda: lease().state == "held")
        assert held(a)["host"] == 4  # brought up from the disk
        kept = ended(cluster, OfKeys(keys=keys), nodes=["a"], tiers=["host"])
        assert [n.dropped for n in kept.nodes] == [{"host": 0}]

        assert http.delete(at).json()["state"] == "ended"
        eventually(
            lambda: (
                ended(cluster, OfKeys(keys=keys), nodes=["a"], tiers=["host"]).nodes[0].dropped
                == {"host": 4}
            )
        )
