"""What a whole node publishes of what its engines do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from pydantic import ByteSize

from kvstrata import wire
from kvstrata.client import Client
from kvstrata.config import EventSettings, HostSettings, NodeSettings, TierSettings
from kvstrata.errors import Malformed
from kvstrata.keys import Key
from kvstrata.node.process import Node
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.waiting import eventually

PAGE = 4096
NAMESPACE = a_namespace(PAGE)
EVENTS = EventSettings(
    listen="tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0", interval=0.005, repeat=0.05
)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def told(n: int) -> wire.Told:
    """A chain: chunk n extends chunk n - 1."""
    return wire.Told(key(n), [100 + n], bytes([n]) * 64, 99 + n if n else None)


@asynccontextmanager
async def running(folder: Path, **kwargs: Any) -> AsyncIterator[Node]:
    node = await Node.start(
        NodeSettings(
            id="a",
            socket=folder / "a.sock",
            host=HostSettings(capacity=ByteSize(8 * PAGE), shm_dir=folder),
            tiers=[TierSettings(type="fs", root=str(folder / "fs"))],  # type: ignore[call-arg]
            **kwargs,
        )
    )
    try:
        yield node
    finally:
        await node.close()


def store(client: Client, *numbers: int) -> None:
    keys = [key(n) for n in numbers]
    assert min(client.reserve(keys)) >= 0
    assert client.commit(keys) == [True] * len(keys)


def announced(address: str) -> dict[str, list[int]]:
    """What a reader knows that asks for everything: block hashes by medium."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(address)
        dealer.send_multipart([b"", bytes(8)])
        held: dict[str, list[int]] = {"CPU": [], "STORAGE": []}
        while payload := dealer.recv_multipart()[3]:
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    held[event["medium"]] += event["block_hashes"]
                elif event["type"] == "BlockRemoved":
                    for block in event["block_hashes"]:
                        held[event["medium"]].remove(block)
        return held


async def test_what_engines_store_and_drop_is_published(tmp_path: Path) -> None:
    def work(address: str) -> None:
        with Client.connect(tmp_path / "a.sock", "e", namespace=NAMESPACE) as client:
            client.tell([told(0), told(1)])
            store(client, 0, 1, 2)
            eventually(lambda: announced(address) == {"CPU": [100, 101], "STORAGE": [100, 101]})
            client.tell([told(2)])
            eventually(lambda: announced(address)["STORAGE"] == [100, 101, 102])
            client.drop(["host"], [key(2)])
            assert announced(address) == {"CPU": [100, 101], "STORAGE": [100, 101, 102]}
            client.drop(["host", "fs"])
            assert announced(address) == {"CPU": [], "STORAGE": []}
            status = client.status()
            assert status.counters["events_untold"] == 2  # chunk 2, at two locations
            assert status.counters["events_told"] == 3
            assert address in status.tasks["events 0 at"]

    async with running(tmp_path, events=[EVENTS]) as node:
        await asyncio.to_thread(work, node.events[0].replay_address)


async def test_a_store_that_survived_is_published_once_it_is_told_of(tmp_path: Path) -> None:
    def fill() -> None:
        with Client.connect(tmp_path / "a.sock", "e", namespace=NAMESPACE) as client:
            store(client, 0, 1)

    def ask(address: str) -> None:
        with Client.connect(tmp_path / "a.sock", "e", namespace=NAMESPACE) as client:
            assert announced(address) == {"CPU": [], "STORAGE": []}
            client.tell([told(1), told(0)])
            assert announced(address) == {"CPU": [], "STORAGE": [100, 101]}

    async with running(tmp_path):
        await asyncio.to_thread(fill)
    async with running(tmp_path, events=[EVENTS]) as node:
        await asyncio.to_thread(ask, node.events[0].replay_address)


async def test_a_store_that_survived_is_published_by_what_is_remembered(tmp_path: Path) -> None:
    def fill() -> None:
        with Client.connect(tmp_path / "a.sock", "e", namespace=NAMESPACE) as client:
            client.tell([told(0), told(1), told(2)])
            store(client, 0, 1)

    memory = tmp_path / "events.sqlite"
    async with running(tmp_path, events=[EVENTS], event_memory=memory) as node:
        await asyncio.to_thread(fill)
    async with running(tmp_path, events=[EVENTS], event_memory=memory) as node:
        address = node.events[0].replay_address
        found = await asyncio.to_thread(announced, address)
        assert found == {"CPU": [], "STORAGE": [100, 101]}


@pytest.mark.parametrize(
    ("told_of", "message"),
    [
        (wire.Told(key(0), [], b"\0" * 64), "1 to 65536 blocks, not 0"),
        (wire.Told(key(0), [1, 2, 3], b"\0" * 64), "are not the tokens"),
        (wire.Told(key(0), [1], b""), "are not the tokens"),
        (wire.Told(key(0), [-1], b"\0" * 64), "64 bits"),
        (wire.Told(key(0), [1], b"\0" * 64, -1), "64 bits"),
        (wire.Told(key(0), [1], b"\0" * 64, None, "x" * 300), "at most 256"),
        (wire.Told(a_namespace(model="x").key(0, b"1"), [1], b"\0" * 64), "not of this session"),
    ],
)
async def test_what_can_not_be_so_is_refused(
    tmp_path: Path, told_of: wire.Told, message: str
) -> None:
    def work() -> None:
        with Client.connect(tmp_path / "a.sock", "e", namespace=NAMESPACE) as client:
            with pytest.raises(Malformed, match=message):
                client.tell([told_of])
            client.tell([told(0)])

    async with running(tmp_path):
        await asyncio.to_thread(work)
