"""`/dump`: how many nodes it asks at a time, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvstrata.errors import Busy
from kvstrata_server.lookups import dump
from kvstrata_server.lookups.compat import Instance, Instances
from kvstrata_server.lookups.dump import Dumps

BLOCK = 2


@asynccontextmanager
async def node(*answers: Any) -> AsyncIterator[str]:
    """Where a node replays these batches; with none it says nothing at all."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        async def serve() -> None:
            while True:
                peer = (await router.recv_multipart())[0]
                for answer in answers:
                    await router.send_multipart(
                        [peer, b"", b"", bytes(8), msgspec.msgpack.encode(answer)]
                    )
                if answers:
                    await router.send_multipart([peer, b"", b"", bytes(8), b""])

        serving = asyncio.create_task(serve())
        try:
            yield f"tcp://127.0.0.1:{port}"
        finally:
            serving.cancel()
            await asyncio.wait({serving})


def stored(*tokens: int) -> Any:
    event = {
        "type": "BlockStored",
        "block_hashes": [1],
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "medium": "CPU",
    }
    return [0.0, [event]]


def dumps(*replays: str, model: str = "m") -> Dumps:
    """Of instances 1, 2, ... that replay there."""
    known = [
        Instance(str(n), model, "default", 0, "", replay, BLOCK, "n")
        for n, replay in enumerate(replays, 1)
    ]
    fake = SimpleNamespace(all=lambda: known, is_up=lambda instance: True)
    return Dumps(cast(Instances, fake))


def threads() -> int:
    """Of this process, with those that libzmq starts."""
    return len(os.listdir("/proc/self/task"))


async def test_what_all_instances_of_a_model_hold() -> None:
    async with node(stored(1, 2)) as one, node(stored(3, 4)) as other:
        found = await dumps(one, other).take()
    events = found["m:default"]["events"]
    assert [(e["worker_id"], e["event"]["event_id"]) for e in events] == [(1, 0), (2, 1)]


async def test_many_that_are_silent_hold_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_SECONDS", 0.2)
    async with node() as silent:
        before = threads()
        taking = asyncio.create_task(dumps(*[silent] * 100).take())
        most = 0
        while not taking.done():
            most = max(most, threads())
            await asyncio.sleep(0.005)
        assert most - before <= 4
        assert (await taking)["m:default"]["error"].endswith("no answer")


async def test_it_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_WHOLE_SECONDS", 0.2)
    monkeypatch.setattr(dump, "_MOST_AT_ONCE", 1)
    async with node() as silent:
        both = dumps(silent, silent)
        loop = asyncio.get_running_loop()
        began = loop.time()
        found: list[Any] = await asyncio.gather(both.take(), both.take(), return_exceptions=True)
        assert loop.time() - began < 5
        assert "no answer" in found[0]["m:default"]["error"]
        assert isinstance(found[1], Busy)


@pytest.mark.parametrize("broken", [["x"], [0.0, [{"type": 7}]], stored(-1, 2), stored(1 << 32, 2)])
async def test_a_node_that_talks_nonsense_is_named_as_such(broken: Any) -> None:
    async with node(stored(1, 2)) as good, node(broken) as bad:
        found = await dumps(good, bad).take()
    assert "did not tell" in found["m:default"]["error"]


def holding(*blocks: int) -> Any:
    event = {"type": "BlockStored", "block_size": BLOCK, "medium": "CPU"}
    tokens = [n for block in blocks for n in (block, block)]
    return [0.0, [event | {"block_hashes": list(blocks), "token_ids": tokens}]]


async def test_what_is_more_than_a_dump_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_MOST_BLOCKS", 4)
    monkeypatch.setattr(dump, "_MOST_AT_ONCE", 1)
    removed = [0.0, [{"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "CPU"}]]
    answers = [
        (holding(1, 2),),
        (holding(1, 2, 3), removed, holding(4)),  # two in the end
        (holding(1, 2),),
        (holding(1, 2), holding(3)),
    ]
    async with contextlib.AsyncExitStack() as stack:
        replays = [await stack.enter_async_context(node(*each)) for each in answers]
        asked = dumps(*replays)
        known = asked._instances.all()
        for at, model in enumerate(("large", "small", "small", "large")):
            known[at] = replace(known[at], model=model)
        found = await asked.take()
    assert "at most 4 blocks" in found["large:default"]["error"]
    assert len(found["small:default"]["events"]) == 4


async def test_an_address_that_is_none() -> None:
    assert "error" in (await dumps("").take())["m:default"]
