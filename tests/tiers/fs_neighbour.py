"""A node of several on one root, as a process: `fs_neighbour.py ROOT SECONDS CAPACITY SEED`.

It stores and loads at full speed, checks every byte, watches that what its index offers is on
disk soon, and prints what it saw as one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path

from fs_kit import blank, item, path

from kvstrata.testing.tiers import payload
from kvstrata.tiers.base import Outcome, TierContext
from kvstrata.tiers.fs import FsTier

SPACE = 4000
BATCH = 8
SIZE = 10_000
GRACE = 5.0
"""Seconds for which an index may offer what another has removed: far below a control plane's."""


class Neighbour:
    def __init__(self, root: Path, tier: FsTier, seed: int) -> None:
        self.root, self.tier = root, tier
        self.rng = random.Random(seed)
        self.outcomes: dict[str, int] = {}
        self.wrong = 0
        self.evicting: list[list[float]] = []
        self.offered: dict[bytes, float] = {}
        self.longest_offered = 0.0
        self.cpu = 0

    async def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        watcher = asyncio.create_task(self.watch(end))
        while time.monotonic() < end:
            first = self.rng.randrange(SPACE)
            ids = range(first, first + BATCH)
            if self.rng.random() < 0.5:
                parents = [None, *ids[:-1]]
                batch = [item(i, SIZE, p) for i, p in zip(ids, parents, strict=True)]
                self.count(await self.tier.store(batch))
                continue
            items = [blank(i, SIZE) for i in ids]
            outcomes = await self.tier.load(items)
            self.count(outcomes)
            for i, outcome in zip(items, outcomes, strict=True):
                if outcome is Outcome.LOADED and i.view != payload(i.key, SIZE):
                    self.wrong += 1
        await watcher

    async def watch(self, end: float) -> None:
        while time.monotonic() < end:
            now = time.monotonic()
            if self.tier._core.shared.evicts:
                if self.evicting and now - self.evicting[-1][1] < 0.5:
                    self.evicting[-1][1] = now
                else:
                    self.evicting.append([now, now])
            keys = self.tier.keys()
            some = self.rng.sample(keys, min(len(keys), 200)) + list(self.offered)
            known = set(keys)
            for k in some:
                i = int.from_bytes(k[20:], "little")
                if k in known and not path(self.root, i).exists():
                    since = self.offered.setdefault(k, now)
                    self.longest_offered = max(self.longest_offered, now - since)
                else:
                    self.offered.pop(k, None)
            await asyncio.sleep(0.1)

    def count(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


async def main() -> None:
    root, seconds, capacity, seed = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
    tier = await FsTier.open({"root": root, "capacity": capacity}, TierContext("node"))
    print(tier._core.root.writer, flush=True)
    neighbour = Neighbour(root, tier, int(seed))
    await neighbour.run(seconds)
    usage = tier.usage()
    print(
        json.dumps(
            {
                "outcomes": neighbour.outcomes,
                "wrong": neighbour.wrong,
                "evicting": neighbour.evicting,
                "longest_offered": neighbour.longest_offered,
                "counters": usage.counters,
                "used": usage.used_bytes,
                "detail": usage.detail,
            }
        ),
        flush=True,
    )
    await tier.close()


if __name__ == "__main__":
    asyncio.run(main())
