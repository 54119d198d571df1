"""10,000 random operations on the obj tier, with every twentieth request to its store going wrong.

Requests are refused, reset, answered and then reset, cut short, and have bits flipped both ways.
The store is SeaweedFS.
"""

from __future__ import annotations

import pytest
from obj_kit import S3
from obj_proxy import Proxy, by_script

from kvstrata.testing.clock import FakeClock
from kvstrata.testing.faulty import FaultScript
from kvstrata.testing.soak import Soak, new_seed
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.obj import ObjTier

CAPACITY = 400_000  # two thirds of the chunks


@pytest.mark.timeout(300)
async def test_no_wrong_byte_and_nothing_lost(seaweedfs: S3) -> None:
    seed = new_seed()
    script = FaultScript(seed, rate=0.05)
    prefix = f"soak-{seed}"
    async with Proxy(seaweedfs, by_script(script, prefix, seaweedfs.bucket)) as proxy:

        async def open_tier(context: TierContext, _: FaultScript) -> Tier:
            options = proxy.s3.options(prefix, capacity=CAPACITY, cool_off="50ms")
            tier = await ObjTier.open(options, context)
            await tier.listed()
            return tier

        soak = Soak(open_tier, script, FakeClock(), capacity=CAPACITY, misses=True)
        report = await soak.run()
    print(report)
    assert report.outcomes["loaded"] > 1000
    assert report.served_at_the_end > 10
    assert sum(report.faults.values()) > 100
