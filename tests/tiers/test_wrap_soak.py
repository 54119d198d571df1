"""10,000 random operations with faults, over wrappers around the memory and the fs tier.

A run prints its seed; KVSTRATA_SEED repeats it.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest
from wrap_kit import memory, wrapped

from kvstrata.keys import Key
from kvstrata.testing import FakeClock
from kvstrata.testing.faulty import HONEST, Fault, FaultScript, Faulty
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.testing.soak import Soak, new_seed
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import path_of

OPERATIONS = int(os.environ.get("KVSTRATA_SOAK_OPERATIONS", "10000"))
CAPACITY = 500_000
MEMORY = [
    [],
    ["checked"],
    ["compressed"],
    ["encrypted"],
    ["encrypted", "compressed", "metered"],
]
FS = [["metered"], ["compressed"], ["encrypted"], ["encrypted", "compressed", "metered"]]


def seed() -> int:
    return int(os.environ.get("KVSTRATA_SEED", "0")) or new_seed()


def script(clock: FakeClock, names: list[str]) -> FaultScript:
    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        await asyncio.sleep(0)

    verified = {*names} - {"metered"}
    return FaultScript(seed(), kinds=tuple(Fault) if verified else HONEST, sleep=sleep)


def named(names: list[str]) -> str:
    return "-".join(names) or "plain"


def damage_memory(tier: Any, key: Key, rng: random.Random) -> bool:
    while not isinstance(tier, MemoryTier):
        tier = tier.inner
    if key not in tier.chunks:
        return False
    content, known = tier.chunks[key]
    content = bytearray(content)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    tier.chunks[key] = bytes(content), known
    return True


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", MEMORY, ids=named)
async def test_memory(tmp_path: Path, names: list[str]) -> None:
    clock = FakeClock(1000.0)

    async def open_tier(context: TierContext, script: FaultScript) -> Tier:
        honest = not ({*names} - {"metered"})
        inner = memory(context, capacity=CAPACITY, verify=honest)
        return wrapped(Faulty(inner, script), names, tmp_path, context)

    soak = Soak(
        open_tier,
        script(clock, names),
        clock,
        capacity=CAPACITY,
        durable=False,
        damage=damage_memory,
        operations=OPERATIONS,
    )
    check(await soak.run())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", FS, ids=named)
async def test_fs(tmp_path: Path, names: list[str]) -> None:
    clock = FakeClock(1000.0)
    root = tmp_path / "fs"

    async def open_tier(context: TierContext, script: FaultScript) -> Tier:
        inner = await FsTier.open({"root": root, "capacity": CAPACITY}, context)
        return wrapped(Faulty(inner, script), names, tmp_path, context)

    def damage(tier: Tier, key: Key, rng: random.Random) -> bool:
        path = root / path_of(key)
        try:
            content = bytearray(path.read_bytes())
        except FileNotFoundError:
            return False
        if rng.random() < 0.3:
            content = content[: rng.randrange(len(content))]
        else:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        return True

    soak = Soak(
        open_tier,
        script(clock, names),
        clock,
        capacity=CAPACITY,
        damage=damage,
        operations=OPERATIONS,
    )
    check(await soak.run())


def check(report: Any) -> None:
    print(report)
    assert report.operations.total() == OPERATIONS
    assert report.served_at_the_end > 0
    assert report.unhealthy < OPERATIONS / 10, "too often excused"
    assert report.faults.total() > OPERATIONS / 50
    assert {"stored", "present", "loaded", "missing", "corrupt", "failed"} <= {*report.outcomes}


async def test_a_tier_that_lies_is_found(tmp_path: Path) -> None:
    clock = FakeClock(1000.0)

    async def open_tier(context: TierContext, script: FaultScript) -> Tier:
        return memory(context)

    lying = Soak(
        open_tier, script(clock, []), clock, durable=False, damage=damage_memory, operations=3000
    )
    with pytest.raises(AssertionError, match="WRONG BYTES"):
        await lying.run()


async def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    reports = []
    for _ in range(2):
        clock = FakeClock(1000.0)

        async def open_tier(context: TierContext, script: FaultScript) -> Tier:
            return Faulty(memory(context, verify=True, capacity=CAPACITY), script)

        faults = FaultScript(42, kinds=HONEST, sleep=lambda s: asyncio.sleep(0))
        soak = Soak(open_tier, faults, clock, durable=False, capacity=CAPACITY, operations=500)
        reports.append(await soak.run())
    assert reports[0] == reports[1]
