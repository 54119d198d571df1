"""Prometheus metrics of a vLLM tier: what it holds, how it is, and what became of chunks."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvstrata_adapters.engines.vllm.tier_shelf import ShelfState

__all__ = ["TierStats", "definitions"]

_BYTES = "vllm:kvstrata_tier_bytes"
_CAPACITY = "vllm:kvstrata_tier_capacity_bytes"
_CHUNKS = "vllm:kvstrata_tier_chunks"
_HEALTHY = "vllm:kvstrata_tier_healthy"
_EVENTS = "vllm:kvstrata_tier_events"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """vLLM ends on a metric that was not defined, so these are all."""
    by_tier = ("tier",)
    return {
        _BYTES: OffloadingGaugeMetadata("Bytes a tier of kvstrata holds.", by_tier),
        _CAPACITY: OffloadingGaugeMetadata("Most bytes it may hold; 0: no bound.", by_tier),
        _CHUNKS: OffloadingGaugeMetadata("Chunks it holds.", by_tier),
        _HEALTHY: OffloadingGaugeMetadata("1, or 0 while it fails or hangs.", by_tier),
        _EVENTS: OffloadingCounterMetadata(
            "What became of chunks and calls: stored, corrupt, evicted and others.",
            ("tier", "event"),
        ),
    }


class TierStats:
    """Counters as vLLM wants them: what was added since the last time."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], int] = {}

    def take(self, states: Iterable[ShelfState]) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        for state in states:
            tier = (state.name,)
            stats.set_gauge(_BYTES, state.used_bytes, tier)
            stats.set_gauge(_CAPACITY, state.capacity_bytes or 0, tier)
            stats.set_gauge(_CHUNKS, state.chunks, tier)
            stats.set_gauge(_HEALTHY, int(not state.detail), tier)
            self._count(stats, state.name, state.counters)
        return stats

    def _count(self, stats: OffloadingConnectorStats, tier: str, counters: dict[str, int]) -> None:
        for event, value in counters.items():
            added = value - self._told.get((tier, event), 0)
            if added > 0:
                stats.increase_counter(_EVENTS, added, (tier, event))
                self._told[tier, event] = value
