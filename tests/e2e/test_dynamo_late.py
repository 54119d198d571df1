"""Consumers that come late: after the replay buffer has forgotten, or by way of our `/dump`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dynamo_kit import BLOCK, PER_CHUNK, Cluster, free_port, has, tolerant

from kvstrata.testing.waiting import eventually

pytestmark = pytest.mark.timeout(240)

SIZE = BLOCK * PER_CHUNK
PROMPTS = [[n] * (2 * SIZE) for n in range(1, 9)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One node that keeps two batches for replay, and has published many more."""
    cluster = Cluster(tmp_path, '"buffer_batches": 2', '"interval": "1ms"', nodes=("a",))
    try:
        cluster.start("server", "a")
        cluster.register("a", cluster.server)
        engine = cluster.engine("a")
        for prompt in PROMPTS:
            engine.store(prompt)
            eventually(lambda p=prompt: cluster.query(cluster.server, p) == {"1": has(2, 2)})
        engine.drop(["host"], PROMPTS[0])
        engine.drop(["host", "fs"], PROMPTS[1], first=1)
        engine.close()
        yield cluster
    finally:
        cluster.close()


WANTED = [{"1": has(0, 2)}, {"1": has(1, 1)}, *[{"1": has(2, 2)}] * 6]


def test_who_subscribes_late_is_told_what_is_there(cluster: Cluster) -> None:
    cluster.start("indexer")
    cluster.register("a", cluster.indexer)
    cluster.agree(PROMPTS, WANTED)


def test_an_indexer_may_start_from_our_dump(cluster: Cluster) -> None:
    eventually(lambda: [cluster.query(cluster.server, p) for p in PROMPTS] == WANTED)
    dump = cluster.http.get(f"{cluster.server}/dump").json()
    assert dump["m:default"]["block_size"] == BLOCK
    # A peer's word counts only for workers that are known here.
    cluster.commands["indexer"] += ["--peers", cluster.server]
    cluster.commands["indexer"] += ["--workers", f"1=tcp://127.0.0.1:{free_port()}"]
    cluster.commands["indexer"] += ["--model-name", "m", "--block-size", str(BLOCK)]
    cluster.start("indexer")
    eventually(lambda: tolerant(lambda: cluster.query(cluster.indexer, PROMPTS[0])))
    cluster.agree(PROMPTS, WANTED)
