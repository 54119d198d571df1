"""Conformance with a real consumer: Dynamo's indexer and selector subscribe to our nodes."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from dynamo_kit import BLOCK, MODEL, PER_CHUNK, Cluster, Lossy, has, tolerant

from kvstrata.testing.waiting import eventually

pytestmark = pytest.mark.timeout(240)

SIZE = BLOCK * PER_CHUNK
PROMPT = [1000 + n for n in range(6 * SIZE)]
OTHER = [*PROMPT[: 3 * SIZE], *range(5000, 5000 + 3 * SIZE)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        cluster.start("server", "indexer", "a", "b")
        for node in cluster.events:
            cluster.register(node, cluster.server)
            cluster.register(node, cluster.indexer)
        yield cluster
    finally:
        cluster.close()


def test_both_know_the_same_of_what_is_stored_moved_and_removed(cluster: Cluster) -> None:
    a, b = cluster.engine("a"), cluster.engine("b")
    a.store(PROMPT)
    b.store(OTHER)
    everything = [PROMPT, OTHER, PROMPT[: 2 * SIZE], [*PROMPT[:SIZE], 1, 2, 3, 4], [9] * 40]
    cluster.agree(
        everything,
        [
            {"1": has(6, 6), "2": has(3, 3)},
            {"1": has(3, 3), "2": has(6, 6)},
            {"1": has(2, 2), "2": has(2, 2)},
            {"1": has(1, 1), "2": has(1, 1)},
            {},
        ],
    )
    a.drop(["host"], PROMPT, first=4)  # from the end, as eviction does
    cluster.agree([PROMPT], [{"1": has(4, 6), "2": has(3, 3)}])
    a.drop(["host"], PROMPT[: 2 * SIZE], first=1)  # and from the middle
    cluster.agree([PROMPT], [{"1": has(1, 6), "2": has(3, 3)}])
    b.drop(["host", "fs"], OTHER, first=2)
    cluster.agree(
        [PROMPT, OTHER], [{"1": has(1, 6), "2": has(2, 2)}, {"1": has(1, 3), "2": has(2, 2)}]
    )
    assert a.fetch(PROMPT) == 6
    cluster.agree([PROMPT], [{"1": has(6, 6), "2": has(2, 2)}])
    b.store(OTHER)
    cluster.agree([OTHER], [{"1": has(3, 3), "2": has(6, 6)}])
    a.drop(["fs"], PROMPT)
    a.drop(["host"], PROMPT)
    cluster.agree([PROMPT], [{"2": has(3, 3)}])
    a.close()
    b.close()


def test_both_know_the_same_after_many_changes(cluster: Cluster) -> None:
    choice = random.Random(5)
    heads = [[n] * SIZE for n in (1, 2)]
    prompts = [
        [*choice.choice(heads), *[10 + choice.randrange(2)] * SIZE, *[30 + n] * SIZE * 2]
        for n in range(8)
    ]
    engines = {node: cluster.engine(node) for node in cluster.events}
    for _ in range(60):
        engine, prompt = engines[choice.choice("ab")], choice.choice(prompts)
        what = choice.randrange(4)
        if what == 0:
            engine.drop([choice.choice(["host", "fs"])], prompt, choice.randrange(4))
        elif what == 1:
            engine.fetch(prompt)
        else:
            engine.store(prompt)  # more than the region holds: others are evicted
    said = cluster.agree([*prompts, *(p[: 2 * SIZE] for p in prompts)])
    assert sum(map(len, said)) > 8
    for engine in engines.values():
        engine.close()


def test_a_lost_message_is_asked_for_again(cluster: Cluster) -> None:
    cluster.post(f"{cluster.indexer}/unregister", instance_id=1, model_name=MODEL)
    lossy = Lossy(f"tcp://127.0.0.1:{cluster.events['a'][0]}")
    try:
        cluster.register("a", cluster.indexer, lossy.address)
        engine = cluster.engine("a")
        engine.store(PROMPT)
        cluster.agree([PROMPT], [{"1": has(6, 6)}])
        lossy.losing = True
        engine.store(OTHER)
        engine.drop(["host"], PROMPT, first=5)
        eventually(lambda: cluster.query(cluster.server, PROMPT) == {"1": has(5, 6)})
        eventually(lambda: lossy.lost > 3)
        assert cluster.query(cluster.indexer, OTHER) == {"1": has(3, 3)}
        lossy.losing = False
        # Nothing more happens at the node: it is the repeated number that tells of the loss.
        cluster.agree([PROMPT, OTHER], [{"1": has(5, 6)}, {"1": has(6, 6)}])
        engine.close()
    finally:
        lossy.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_that_restarts_is_known_as_what_it_is_now(
    cluster: Cluster, how: signal.Signals
) -> None:
    engine = cluster.engine("a")
    engine.store(PROMPT)
    cluster.agree([PROMPT], [{"1": has(6, 6)}])
    engine.close()
    eventually(lambda: cluster.remembered("a") == 6)
    cluster.end("a", how)
    eventually(lambda: cluster.query(cluster.server, PROMPT) == {})
    if how == signal.SIGTERM:
        cluster.agree([PROMPT], [{}])
    cluster.start("a")
    # Its memory is empty, its disk is not; nobody has to tell it what is there.
    cluster.agree([PROMPT], [{"1": has(0, 6)}])
    engine = cluster.engine("a")
    engine.store(OTHER)
    cluster.agree([OTHER], [{"1": has(6, 6)}])
    assert engine.fetch(PROMPT) == 6
    cluster.agree([PROMPT, OTHER], [{"1": has(6, 6)}, {"1": has(6, 6)}])
    engine.close()


def test_the_selector_sends_a_request_to_who_has_most_of_it(cluster: Cluster) -> None:
    cluster.start("selector")
    for node, (live, replay) in cluster.events.items():
        body = {
            "worker_id": cluster.instance(node),
            "model_name": MODEL,
            "block_size": BLOCK,
            "endpoint": f"http://{node}.test",
            "kv_events_endpoint": f"tcp://127.0.0.1:{live}",
            "replay_endpoint": f"tcp://127.0.0.1:{replay}",
        }
        eventually(
            lambda body=body: tolerant(lambda: cluster.post(f"{cluster.selector}/workers", **body))
        )
    engines = {node: cluster.engine(node) for node in cluster.events}
    engines["a"].store(PROMPT)
    engines["b"].store(OTHER)
    for prompt in (PROMPT, OTHER):
        ours = eventually(
            lambda p=prompt: len(found := cluster.query(cluster.server, p)) == 2 and found
        )
        best = max(ours, key=lambda name: ours[name]["longest_matched"])

        def selected(p: list[int] = prompt, best: str = best) -> bool:
            answer = cluster.post(f"{cluster.selector}/select", token_ids=p, model_name=MODEL)
            return str(answer["worker_id"]) == best and answer

        answer = eventually(selected)
        assert answer["overlap"]["cpu"] == ours[best]["cpu"]
        assert answer["overlap"]["disk"] == ours[best]["disk"]
    engines["b"].drop(["host", "fs"], OTHER)
    eventually(
        lambda: (
            str(
                cluster.post(f"{cluster.selector}/select", token_ids=OTHER, model_name=MODEL)[
                    "worker_id"
                ]
            )
            == "1"
        )
    )
    for engine in engines.values():
        engine.close()
