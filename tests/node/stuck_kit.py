"""A tier whose calls hang in threads that nothing can wake, as over a dead mount."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tier_kit import TroubledTier

from kvstrata.tiers.base import Item, Outcome, Tier, TierContext

__all__ = ["StuckTier"]


def _hang(marker: str = "") -> None:
    if marker:
        Path(marker).touch()
    time.sleep(600)


class StuckTier(TroubledTier):
    """`call` is the one that hangs: `open`, `store` or `close`. `marker` is a file that it makes
    when it is about to hang in `open`."""

    def __init__(self, call: str, marker: str) -> None:
        super().__init__("stuck")
        self.call = call

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        if options["call"] == "open":
            await asyncio.to_thread(_hang, options["marker"])
        return cls(**options)

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        if self.call == "store":
            await asyncio.to_thread(_hang)
        return await super().store(batch, deadline)

    async def close(self) -> None:
        if self.call == "close":
            await asyncio.to_thread(_hang)
        await super().close()
