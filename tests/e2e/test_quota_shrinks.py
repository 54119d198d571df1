"""A tenant over its quota shrinks to below it, by what is coldest; the other one loses nothing."""

from contextlib import ExitStack, closing

import pytest
from cluster_kit import PAGE, Cluster, started

from kvstrata import api
from kvstrata.client import Client
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.waiting import eventually

ACME, OTHER = a_namespace(PAGE, tenant="acme"), a_namespace(PAGE, tenant="other")
QUOTA = 64


def names(namespace, numbers):
    return [namespace.key(0, n.to_bytes(4, "big")) for n in numbers]


def write(cluster: Cluster, namespace, numbers) -> Client:
    path = cluster.folder / "a.sock"
    client = eventually(lambda: Client.connect(path, namespace.tenant, namespace=namespace))
    for n in numbers:  # one by one, so that each is younger than the one before
        (key,) = names(namespace, [n])
        (offset,) = client.reserve([key])
        client.region.view[offset : offset + PAGE] = bytes([n]) * PAGE
        assert client.commit([key]) == [True]
    return client


def held(cluster: Cluster, namespace, numbers) -> dict[str, set[int]]:
    """By tier."""
    found: dict[str, set[int]] = {"host": set(), "fs": set()}
    for n in numbers:
        asked = api.LookupRequest(keys=[key.hex() for key in names(namespace, [n])], mode="all")
        for node in cluster.control.lookup(asked).nodes:
            for tier in node.tiers:
                found[tier].add(n)
    return found


@pytest.mark.timeout(240)
def test_a_tenant_over_its_quota_shrinks_and_the_other_loses_nothing(tmp_path):
    with started(tmp_path) as cluster, ExitStack() as stack:
        control, mine, others = cluster.control, range(60), range(20)
        acme = stack.enter_context(closing(write(cluster, ACME, mine)))
        stack.enter_context(closing(write(cluster, OTHER, others)))
        kept = acme.lookup(names(ACME, [0]))  # the coldest, but leased
        use = eventually(lambda: (u := control.quota("acme").use).chunks == 120 and u)
        assert use.tiers == {"host": 60 * PAGE, "fs": 60 * PAGE}
        before = held(cluster, OTHER, others)
        assert before == {"host": set(others), "fs": set(others)}

        control.put_quota("acme", api.QuotaRequest(max_bytes=QUOTA * PAGE))
        info = eventually(
            lambda: (q := control.quota("acme")).use.bytes <= QUOTA * PAGE and not q.eviction and q
        )
        left = held(cluster, ACME, mine)
        assert sum(map(len, left.values())) == info.use.chunks
        assert info.use.bytes > 0.9 * QUOTA * PAGE  # no more than was asked for
        assert 0 in left["host"] & left["fs"]
        # Of the fs tier the order is by batches as they were stored.
        young = sorted(left["host"] - {0})
        assert young == list(range(young[0], 60)), "the coldest went first"
        assert held(cluster, OTHER, others) == before
        acme.release(kept.lease)

        refused = api.TransferRequest(
            target="b", keys=[key.hex() for key in names(ACME, range(50, 60))], dry_run=True
        )
        plan = control.create_transfer(refused)
        assert plan.counts[api.Outcome.NO_ROOM] >= 6
        assert "no room for" in plan.detail
