"""The contract of a tier as a test suite.

    class TestMyTier(TierTests):
        async def open_tier(self, tmp_path, context):
            return await MyTier.open({"root": str(tmp_path)}, context)

Say with `durable` whether chunks outlive a tier object, with `sizes` which payloads it takes.
Give `open_bounded` if the tier can be bounded, `damage` (and which `damages`) if its objects can
be damaged, `stall` if its medium can hang: their tests are skipped otherwise. A tier that only
reads (`writable = False`) gives `fill`. Needs pytest-asyncio. See `docs/writing-a-tier.md`.
"""

from __future__ import annotations

import pytest

from kvstrata.testing.tier_calls import CallTests
from kvstrata.testing.tier_hooks import Damage, aligned, payload
from kvstrata.testing.tier_state import StateTests
from kvstrata.testing.tier_time import TimeTests

__all__ = ["Damage", "TierTests", "aligned", "payload"]


class TierTests(CallTests, StateTests, TimeTests):
    """Inherit these tests by subclassing; see the module's docstring for the hooks."""

    pytestmark = pytest.mark.asyncio
