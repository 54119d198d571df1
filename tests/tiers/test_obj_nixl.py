"""The obj tier loading through NIXL: the contract again, and that it falls back key by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from obj_kit import S3
from obj_proxy import Forward, Proxy, Request, Response, refusal
from test_obj import ObjTierTests
from test_obj_store import CORRUPT, LOADED, MISSING, STORED, items, key, load

from kvstrata.errors import ConfigError
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.obj import ObjTier
from kvstrata.transports.nixl_agent import import_nixl

try:
    import_nixl()
except ConfigError as e:
    pytest.skip(f"NIXL isn't installed: {e}", allow_module_level=True)


class TestThroughNixl(ObjTierTests):
    server = "seaweedfs"

    async def open_tier(self, tmp_path: Path, context: TierContext, **options: Any) -> ObjTier:
        return await super().open_tier(tmp_path, context, nixl=True, **options)


async def test_payloads_come_by_nixl(seaweedfs: S3, tmp_path: Path) -> None:
    tier = await ObjTier.open(seaweedfs.options(tmp_path.name, nixl=True), TierContext("node"))
    sizes = {0: 1, 1: 4095, 2: 4096, 3: 1 << 20}
    for i, size in sizes.items():
        assert await tier.store(items(i, size=size)) == [STORED]
        assert await load(tier, i, size=size) == [LOADED]
    counters = tier.usage().counters
    assert (counters["by_nixl"], counters["not_by_nixl"]) == (4, 0)
    await tier.close()


async def test_what_nixl_fails_at_comes_the_usual_way(seaweedfs: S3, tmp_path: Path) -> None:
    """The plugin is the one that doesn't call itself aiobotocore."""

    async def refuse_nixl(request: Request, forward: Forward) -> Response | None:
        ours = "aiobotocore" in request.header("user-agent")
        chunk_2 = request.target.endswith("/02000000.0.kv")
        return await forward(request) if ours or not chunk_2 else refusal(403, "AccessDenied")

    async with Proxy(seaweedfs, refuse_nixl) as proxy:
        tier = await ObjTier.open(proxy.s3.options(tmp_path.name, nixl=True), TierContext("node"))
        await tier.store(items(0, 1, 2, 3))
        assert await load(tier, 0, 1, 2, 3, 9) == [LOADED] * 4 + [MISSING]
        counters = tier.usage().counters
        assert (counters["by_nixl"], counters["not_by_nixl"]) == (3, 1)
        await tier.close()


async def test_damage_that_nixl_brings_is_seen(seaweedfs: S3, tmp_path: Path) -> None:
    tier = await ObjTier.open(seaweedfs.options(tmp_path.name, nixl=True), TierContext("node"))
    await tier.store(items(0, 1))
    body, metadata = seaweedfs.read(tmp_path.name, key(0))
    seaweedfs.write(tmp_path.name, key(0), body[:-1] + bytes([body[-1] ^ 1]), metadata)
    assert await load(tier, 0, 1) == [CORRUPT, LOADED]
    await tier.close()


async def test_a_read_that_was_given_up_touches_no_memory_later(
    seaweedfs: S3, tmp_path: Path
) -> None:
    tier = await ObjTier.open(seaweedfs.options(tmp_path.name, nixl=True), TierContext("node"))
    await tier.store(items(0, 1, 2, 3))
    blank = items(0, 1, 2, 3)
    nixl = tier._client._nixl
    assert nixl is not None
    # HEADs are answered, then the store hangs with NIXL's requests under way.
    real = nixl._begin

    def begin(name: str, nbytes: int) -> Any:
        if not stalled:
            stalled.append(seaweedfs.stall())
            stalled[0].__enter__()
        return real(name, nbytes)

    stalled: list[Any] = []
    nixl._begin = begin  # type: ignore[method-assign]
    try:
        outcomes = await tier.load(blank, deadline=tier._context.clock() + 0.5)
        assert LOADED not in outcomes
        for item in blank:
            item.view[:] = b"\x55" * item.view.nbytes
        assert nixl._given_up
    finally:
        stalled[0].__exit__(None, None, None)
    nixl._begin = real  # type: ignore[method-assign]

    def collected() -> bool:
        nixl._collect()
        return not nixl._given_up

    await until(collected)
    assert all(item.view == b"\x55" * item.view.nbytes for item in blank)
    await until(lambda: tier.usage().healthy)
    assert await load(tier, 0, 1, 2, 3) == [LOADED] * 4
    await tier.close()


async def test_reads_that_fail_to_begin_take_bounded_memory(
    seaweedfs: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they may still do with their buffers isn't known, so these aren't used again."""
    tier = await ObjTier.open(seaweedfs.options(tmp_path.name, nixl=True), TierContext("node"))
    await tier.store(items(0))
    nixl = tier._client._nixl
    assert nixl is not None

    def transfer(handle: Any) -> str:
        raise RuntimeError("told to")

    monkeypatch.setattr(nixl._agent, "transfer", transfer)
    for _ in range(70):
        assert await load(tier, 0) == [LOADED]
    assert len(nixl._lost) == 64
    assert tier.usage().counters["not_by_nixl"] == 70
    await tier.close()
