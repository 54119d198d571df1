"""Contracts as test suites, for parts in this package and outside it. Needs pytest.

Subclass `TierTests`, say how to open your tier, and inherit its tests; `TransportTests`, and
say your transport's name; `PolicyTests`, and open your policy; `DeviceTests`, and make caches.
`Faulty` puts faults into a tier by a seeded `FaultScript`, and `Soak` compares thousands of random
calls with a model; `MemoryTier` is something to put wrappers around.
"""

from __future__ import annotations

from kvstrata.testing.clock import FakeClock
from kvstrata.testing.devices import DeviceTests
from kvstrata.testing.faulty import Fault, FaultScript, Faulty
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.testing.policies import PolicyTests
from kvstrata.testing.soak import Soak
from kvstrata.testing.tiers import Damage, TierTests
from kvstrata.testing.transports import TransportTests

__all__ = [
    "Damage",
    "DeviceTests",
    "FakeClock",
    "Fault",
    "FaultScript",
    "Faulty",
    "MemoryTier",
    "PolicyTests",
    "Soak",
    "TierTests",
    "TransportTests",
]
