"""Who kills processes of a cluster, and lets them come back after a while."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from killed_cluster_kit import KilledCluster


class Killer:
    """Of `victims`, in an order and at moments that `rng` chooses: each when so and so many of
    `transfers` were asked for. The last tenth of them finds all well again, or soon."""

    def __init__(
        self, cluster: KilledCluster, victims: Sequence[str], transfers: int, rng: random.Random
    ) -> None:
        moments = rng.sample(range(transfers // 50, transfers * 9 // 10), len(victims))
        self._due = [
            (moment, name, rng.uniform(0, 0.1), rng.uniform(0.1, 1.5))
            for moment, name in zip(sorted(moments), rng.sample(victims, len(victims)), strict=True)
        ]
        self._cluster = cluster
        self._tasks: list[asyncio.Task[None]] = []
        self._one_at_a_time = {name: asyncio.Lock() for name in victims}

    def asked(self, number: int) -> None:
        """So many transfers were asked for by now."""
        while self._due and self._due[0][0] <= number:
            _, name, after, away = self._due.pop(0)
            self._tasks.append(asyncio.create_task(self._strike(name, after, away)))

    async def _strike(self, name: str, after: float, away: float) -> None:
        async with self._one_at_a_time[name]:
            await asyncio.sleep(after)
            outage = await asyncio.to_thread(self._cluster.strike, name)
            await asyncio.sleep(away)
            await asyncio.to_thread(self._cluster.come_back, outage)

    async def all_back(self) -> None:
        await asyncio.gather(*self._tasks)
