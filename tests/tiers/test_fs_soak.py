"""The fs tier under faults: 10,000 random operations, damage of every kind, sudden death."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from fs_kit import FaultySystem, blank, item, key, path

from kvstrata.keys import Key
from kvstrata.testing import FakeClock
from kvstrata.testing.tiers import payload
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Outcome, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import PAGE_BYTES, file_bytes

STORED, PRESENT, LOADED = Outcome.STORED, Outcome.PRESENT, Outcome.LOADED
SIZE = 6000
SPACE = 120
BATCH = 6
CAPACITY = 80 * file_bytes(SIZE)
OPERATIONS = 10_000
RATE = 0.015
"""Of all system calls, so that more than one operation in twenty meets a fault."""


def int_of(k: Key) -> int:
    return int.from_bytes(k[20:], "little")


class Soak:
    """A tier under faults, and what it has acknowledged and not taken back."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.rng = random.Random(seed)
        self.clock = FakeClock(0.0)
        self.system = FaultySystem()
        self.held: set[Key] = set()
        self.damaged: set[Key] = set()
        self.unsure: set[Key] = set()  # a store that failed may have replaced them for all that
        self.done: dict[str, int] = {}
        self.tier: FsTier

    async def open(self) -> None:
        context = TierContext("node", clock=self.clock, on_removed=self.removed)
        options = {"root": self.root, "capacity": CAPACITY, "stuck_after": "1h"}
        self.tier = await FsTier.open(options, context, self.system)

    def removed(self, keys: list[Key]) -> None:
        self.held.difference_update(keys)
        # What a tier gives up without removing it (it read badly, and then there was no room for
        # it anew) is found again, and as damaged as it was.
        gone = [k for k in keys if not path(self.root, int_of(k)).exists()]
        self.damaged.difference_update(gone)

    async def step(self) -> None:
        self.clock.advance(3 * self.rng.random())
        self.tier._upkeep.look()
        if not self.tier.usage().healthy:
            await asyncio.sleep(0.002)  # probes are threads
        ids = [self.rng.randrange(SPACE) for _ in range(self.rng.randrange(1, BATCH))]
        what = self.rng.choices(["store", "load", "lookup", "evict", "damage"], [9, 9, 3, 1, 1])[0]
        await getattr(self, what)(list(dict.fromkeys(ids)))
        used = self.tier.usage().used_bytes
        assert used <= CAPACITY + BATCH * file_bytes(SIZE)

    async def store(self, ids: list[int]) -> None:
        items = [item(i, SIZE, parent=i - 1 if i else None) for i in ids]
        outcomes = await self.tier.store(items)
        self.count(outcomes)
        for i, outcome in zip(items, outcomes, strict=True):
            if outcome is STORED:
                self.damaged.discard(i.key)
            if outcome is Outcome.FAILED:
                self.unsure.add(i.key)
            if outcome in (STORED, PRESENT) and i.key in self.tier._core.index:
                self.held.add(i.key)

    async def load(self, ids: list[int]) -> None:
        held = set(self.held)
        items = [blank(i, SIZE) for i in ids]
        outcomes = await self.tier.load(items)
        self.count(outcomes)
        for i, outcome in zip(items, outcomes, strict=True):
            if outcome is LOADED:
                assert i.view == payload(i.key, SIZE), "wrong bytes were served"
                self.is_whole(i.key)
            if outcome is Outcome.MISSING:
                gone = i.key not in held or self.system.took_away(path(self.root, int_of(i.key)))
                assert gone, "acknowledged, undamaged and missing"
            if outcome is Outcome.CORRUPT:
                # Two flips in a row on the way look like damage, and are announced as such.
                assert i.key not in self.held

    async def lookup(self, ids: list[int]) -> None:
        found = await self.tier.lookup([key(i) for i in ids])
        if self.tier.usage().healthy:
            whole = self.held - self.damaged
            assert all(f for i, f in zip(ids, found, strict=True) if key(i) in whole)

    async def evict(self, ids: list[int]) -> None:
        await self.tier.evict([key(i) for i in ids[:1]])

    async def damage(self, ids: list[int]) -> None:
        file = path(self.root, ids[0])
        content = bytearray(file.read_bytes() if file.exists() else b"")
        if not content:
            return
        if self.rng.random() < 0.3:
            content = content[: self.rng.randrange(len(content))]
        else:
            at = self.rng.randrange(min(len(content), PAGE_BYTES + SIZE))
            content[at] ^= 1 << self.rng.randrange(8)
        file.write_bytes(content)
        self.damaged.add(key(ids[0]))
        self.unsure.discard(key(ids[0]))

    def is_whole(self, key: Key) -> None:
        """It was served."""
        if key in self.unsure:
            self.damaged.discard(key)
        assert key not in self.damaged

    def count(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.done[outcome] = self.done.get(outcome, 0) + 1

    async def check_all(self) -> None:
        """Without faults, all that was acknowledged and not damaged is served."""
        items = [blank(i, SIZE) for i in range(SPACE)]
        before = set(self.held) - self.damaged
        outcomes = await self.tier.load(items)
        for i, outcome in zip(items, outcomes, strict=True):
            if i.key in before:
                assert outcome is LOADED
            if outcome is LOADED:
                assert i.view == payload(i.key, SIZE)
                self.is_whole(i.key)


@pytest.mark.timeout(300)
async def test_ten_thousand_operations_with_faults(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    soak = Soak(tmp_path, seed)
    await soak.open()
    for n in range(OPERATIONS):
        if n % (OPERATIONS // 5) == 0:
            soak.system.random_faults(0, seed)
            await soak.tier.close()
            await soak.open()
            await soak.check_all()
            soak.system.random_faults(RATE, seed + n)
        await soak.step()
    soak.system.random_faults(0, seed)
    await soak.tier.close()
    await soak.open()
    await soak.check_all()
    soak.clock.advance(100)
    await until(lambda: soak.tier.usage().healthy)
    await soak.tier.close()
    print(soak.done, dict(soak.system.faults), soak.tier._core.counters)
    assert soak.done[STORED] > 500
    assert soak.done[LOADED] > 1000
    assert sum(soak.system.faults.values()) > 0.05 * OPERATIONS


async def test_a_thousand_flips_of_the_payload(tmp_path: Path) -> None:
    """And of every byte of the header: see `test_fs_files`."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    tier = await FsTier.open({"root": tmp_path}, TierContext("node"))
    size = 100_000
    whole = item(0, size)
    await tier.store([whole])
    good = path(tmp_path, 0).read_bytes()
    for _ in range(1000):
        at = PAGE_BYTES + rng.randrange(size)
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        path(tmp_path, 0).write_bytes(bad)
        assert await tier.load([blank(0, size)]) == [Outcome.CORRUPT], at
    assert tier.usage().counters["corrupt"] == 1000
    assert await tier.store([whole]) == [STORED]
    again = blank(0, size)
    assert await tier.load([again]) == [LOADED]
    assert again.view == whole.view
    await tier.close()


@pytest.mark.parametrize("size", range(0, file_bytes(SIZE), 512))
async def test_what_is_cut_short_is_missing_after_a_restart(tmp_path: Path, size: int) -> None:
    tier = await FsTier.open({"root": tmp_path}, TierContext("node"))
    await tier.store([item(i, SIZE) for i in range(3)])
    await tier.close()
    os.truncate(path(tmp_path, 1), size)
    tier = await FsTier.open({"root": tmp_path}, TierContext("node"))
    outcomes = await tier.load([blank(i, SIZE) for i in range(3)])
    assert [outcomes[0], outcomes[2]] == [LOADED, LOADED]
    assert outcomes[1] in (Outcome.CORRUPT, Outcome.MISSING)
    assert await tier.store([item(1, SIZE)]) == [STORED]
    assert await tier.load([blank(1, SIZE)]) == [LOADED]
    await tier.close()
