"""A node tells of itself whatever its tiers do, and without holding up its loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from pydantic import ByteSize

from kvstrata.client import Client
from kvstrata.config import HostSettings, NodeSettings, TierSettings
from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.node.process import Node
from kvstrata.node.run import run_node
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage


class OddTier(Tier):
    """Holds nothing, and says of itself what the test has set."""

    name = "odd"
    said: ClassVar[Any] = None
    open_tiers: ClassVar[set[OddTier]] = set()

    def __init__(self, store_id: str) -> None:
        self.store_id = store_id

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        tier = cls(options.get("store", "odd-1"))
        cls.open_tiers.add(tier)
        return tier

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        return [False] * len(keys)

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        return [Outcome.NO_ROOM] * len(batch)

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        return [Outcome.MISSING] * len(batch)

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        return [False] * len(keys)

    def keys(self) -> list[Key]:
        return []

    def usage(self) -> Usage:
        if isinstance(self.said, Exception):
            raise self.said
        said: Usage = self.said
        return said

    async def drain(self, deadline: float | None = None) -> None:
        return None

    async def close(self) -> None:
        self.open_tiers.discard(self)


def settings(folder: Path, **kwargs: Any) -> NodeSettings:
    kwargs.setdefault("tiers", [TierSettings(type="test_node_status:OddTier")])
    return NodeSettings(
        id="a",
        socket=folder / "a.sock",
        host=HostSettings(capacity=ByteSize(1 << 16), shm_dir=folder),
        **kwargs,
    )


def regions(folder: Path) -> list[Path]:
    return list(folder.glob("kvstrata-*"))


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        (RuntimeError("no answer"), "RuntimeError: no answer"),
        (None, "AttributeError"),
        (Usage("many", 1), "ValueError"),  # type: ignore[arg-type]
        (Usage(-1, 1), "ValueError"),
        (Usage(1 << 80, 1), "ValueError"),
        (Usage(1, 1, counters={"a": "b"}), "ValueError"),  # type: ignore[dict-item]
        (Usage(1, 1, counters=7), "TypeError"),  # type: ignore[arg-type]
    ],
)
async def test_a_tier_that_can_not_tell_of_itself_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any, detail: str
) -> None:
    monkeypatch.setattr(OddTier, "said", said)
    node = await Node.start(settings(tmp_path))
    try:

        def work() -> Any:
            with Client.connect(tmp_path / "a.sock", "e", role="tool", timeout=5.0) as client:
                return client.status()

        status = await asyncio.to_thread(work)
        (odd,) = [tier for tier in status.tiers if tier.name == "odd"]
        assert (odd.healthy, odd.used_bytes, odd.chunks) == (False, 0, 0)
        assert detail in odd.detail
        assert odd.counters["hits"] == 0
        healthy, trouble = node.health()
        assert not healthy
        assert detail in trouble
    finally:
        await node.close()


async def test_numbers_of_other_types_are_taken_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OddTier, "said", Usage(5.0, True, None, 1, 3, {"a": 2.0}))  # type: ignore[arg-type, dict-item]
    node = await Node.start(settings(tmp_path))
    (odd,) = [tier for tier in node.status(0).tiers if tier.name == "odd"]
    assert (odd.used_bytes, odd.chunks, odd.healthy, odd.detail) == (5, 1, True, "3")
    assert odd.counters["a"] == 2
    await node.close()


async def test_metrics_are_read_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are made of changes under the hands of any other thread."""
    threads = set()

    class Watched(OddTier):
        def usage(self) -> Usage:
            threads.add(threading.current_thread())
            return Usage(0, 0)

    monkeypatch.setitem(globals(), "Watched", Watched)
    tiers = [TierSettings(type="test_node_status:Watched")]
    node = await Node.start(settings(tmp_path, metrics="127.0.0.1:0", tiers=tiers))
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(f"http://127.0.0.1:{node.metrics_port}/metrics")
    assert answer.status_code == 200
    await node.close()
    assert threads == {threading.current_thread()}


async def test_the_loop_runs_while_metrics_stop(tmp_path: Path) -> None:
    node = await Node.start(settings(tmp_path, metrics="127.0.0.1:0", tiers=[]))
    loop = asyncio.get_running_loop()
    gaps = []

    async def tick() -> None:
        last = loop.time()
        while True:
            await asyncio.sleep(0.001)
            gaps.append(loop.time() - last)
            last = loop.time()

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await node.close()
    ticking.cancel()
    assert max(gaps) < 0.2


async def test_a_tier_that_can_not_be_attached_is_closed(tmp_path: Path) -> None:
    twice = [TierSettings(type="test_node_status:OddTier") for _ in range(2)]
    with pytest.raises(ConfigError, match="configured twice"):
        await Node.start(settings(tmp_path, tiers=twice))
    assert not OddTier.open_tiers


async def test_the_loop_runs_while_memory_is_populated(tmp_path: Path) -> None:
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticking = asyncio.create_task(tick())
    config = settings(tmp_path, tiers=[])
    config.host.capacity = ByteSize(128 << 20)
    node = await Node.start(config)
    ticking.cancel()
    await node.close()
    assert turns >= 8


async def test_a_node_can_be_stopped_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = asyncio.Event()

    class Slow(OddTier):
        @classmethod
        async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
            opening.set()
            return await asyncio.get_running_loop().create_future()

    monkeypatch.setitem(globals(), "Slow", Slow)
    tiers = [TierSettings(type="test_node_status:Slow")]
    running = asyncio.create_task(run_node(settings(tmp_path, tiers=tiers)))
    await opening.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(5):
        await running
    assert regions(tmp_path) == []
