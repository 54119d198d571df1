"""The fs tier: the contract of every tier, and what only files can suffer."""

from __future__ import annotations

import os
from pathlib import Path

from kvstrata.keys import Key
from kvstrata.testing import Damage, TierTests
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.fs import FsTier
from kvstrata.tiers.fs_format import PAGE_BYTES, path_of


def flip(path: Path, offset: int, bit: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


class TestFsTier(TierTests):
    async def open_tier(self, tmp_path: Path, context: TierContext) -> Tier:
        return await FsTier.open({"root": tmp_path}, context)

    async def open_bounded(self, tmp_path: Path, context: TierContext, capacity: int) -> Tier:
        return await FsTier.open({"root": tmp_path, "capacity": capacity}, context)

    async def damage(self, tier: Tier, key: Key, how: Damage, other: Key) -> None:
        path, partner = (Path(tier._root.at(path_of(k))) for k in (key, other))
        match how:
            case Damage.FLIP:
                flip(path, PAGE_BYTES + 5)
            case Damage.TRUNCATE:
                os.truncate(path, path.stat().st_size // 2)
            case Damage.SWAP:
                spare = path.with_suffix(".swap")
                path.rename(spare)
                partner.rename(path)
                spare.rename(partner)
