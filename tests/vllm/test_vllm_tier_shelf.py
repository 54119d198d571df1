"""One tier of kvstrata under vLLM, and rows that vLLM takes back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstrata.testing import FakeClock
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.tiers.base import TierContext
from kvstrata_adapters.engines.vllm import tier_shelf
from kvstrata_adapters.engines.vllm.tier_jobs import Chunk, Job
from kvstrata_adapters.engines.vllm.tier_rows import Rows
from kvstrata_adapters.engines.vllm.tier_shelf import Shelf

pytestmark = pytest.mark.vllm

ROW = 4096


async def test_rows_that_were_taken_back_before_their_checksum_are_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job given up while its checksums wait for a thread: they would be of what came next."""
    memory = memoryview(bytearray(b"a" * 2 * ROW)).cast("B", (2, ROW))
    name = a_namespace().key(0, b"12345678")
    job = Job(1, [b"key"], [Chunk(b"key", name, 1)], is_load=False, patience=30.0)
    tier = await MemoryTier.open({"capacity": 1 << 20}, TierContext("node", FakeClock()))
    stored: list[bytes] = []
    checksums = tier_shelf._checksums

    def late(views: list[memoryview]) -> list[int]:
        assert job.end(force=True)
        views[0][:] = b"b" * ROW
        return checksums(views)

    monkeypatch.setattr(tier_shelf, "_checksums", late)
    with ThreadPoolExecutor(1) as pool:
        shelf = Shelf("memory", tier, Rows(memory, ROW), 1 << 20, pool, stored.extend)
        async with asyncio.timeout(10):
            await shelf.store(job, job.chunks)
    assert (tier.keys(), stored, job.done) == ([], [], set())
    await tier.close()
