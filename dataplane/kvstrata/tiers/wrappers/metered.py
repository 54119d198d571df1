"""Prometheus metrics of a tier: calls, outcomes, bytes and latencies of each operation.

    kvstrata_tier_call_seconds{tier, op}            histogram of calls (batches) that ended
    kvstrata_tier_call_failures_total{tier, op, error}   calls that raised, or were cancelled
    kvstrata_tier_calls_running{tier, op}           calls that have not ended
    kvstrata_tier_items_total{tier, op, outcome}    chunks, by what became of them
    kvstrata_tier_item_bytes_total{tier, op}        payload bytes stored or loaded

`Wrapper.collectors()` of a tier gives its collectors; `TierMetrics` is one collector over all
tiers of a node, for its registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext
from kvstrata.tiers.wrappers.base import Wrapper, WrapperOptions

__all__ = ["Metered", "MeteredOptions", "TierMetrics"]


_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class MeteredOptions(WrapperOptions):
    """Options of the wrapper `metered`."""

    buckets: tuple[float, ...] = _BUCKETS
    """Upper bounds of the latency histogram, in seconds."""


class Metered(Wrapper):
    """Meters every call; times are real ones, of `timer` (seconds)."""

    kind: ClassVar[str] = "metered"

    def __init__(
        self,
        inner: Tier,
        options: MeteredOptions,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Use `wrap`."""
        super().__init__(inner)
        self._timer = timer
        self._registry = CollectorRegistry()
        names: dict[str, Any] = {"namespace": "kvstrata_tier", "registry": self._registry}
        self._seconds = Histogram(
            "call_seconds",
            "How long calls took, batch by batch.",
            ["op"],
            buckets=options.buckets,
            **names,
        )
        self._failures = Counter(
            "call_failures", "Calls that raised or were cancelled.", ["op", "error"], **names
        )
        self._running = Gauge("calls_running", "Calls that have not ended.", ["op"], **names)
        self._items = Counter(
            "items", "Chunks, by what became of them.", ["op", "outcome"], **names
        )
        self._bytes = Counter("item_bytes", "Payload bytes stored or loaded.", ["op"], **names)

    @classmethod
    def wrap(cls, inner: Tier, options: dict[str, Any], context: TierContext) -> Metered:
        return cls(inner, MeteredOptions.parse(cls.kind, options))

    def collectors(self) -> list[Collector]:
        return [_Labelled(self._registry, lambda: self.name), *super().collectors()]

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        with self._timed("lookup"):
            found = await self.inner.lookup(keys, deadline)
        self._count("lookup", ("found" if here else "missing" for here in found))
        return found

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        with self._timed("store"):
            outcomes = await self.inner.store(batch, deadline)
        self._count("store", outcomes)
        self._weigh("store", batch, outcomes, Outcome.STORED)
        return outcomes

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        with self._timed("load"):
            outcomes = await self.inner.load(batch, deadline)
        self._count("load", outcomes)
        self._weigh("load", batch, outcomes, Outcome.LOADED)
        return outcomes

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        with self._timed("evict"):
            gone = await self.inner.evict(keys)
        self._count("evict", ("evicted" if was else "missing" for was in gone))
        return gone

    async def drain(self, deadline: float | None = None) -> None:
        with self._timed("drain"):
            await self.inner.drain(deadline)

    @contextlib.contextmanager
    def _timed(self, op: str) -> Iterator[None]:
        began = self._timer()
        running = self._running.labels(op)
        running.inc()
        try:
            yield
        except (Exception, asyncio.CancelledError) as e:
            self._failures.labels(op, type(e).__name__).inc()
            raise
        finally:
            running.dec()
            self._seconds.labels(op).observe(self._timer() - began)

    def _count(self, op: str, outcomes: Iterable[str]) -> None:
        for outcome, count in Tally(outcomes).items():
            self._items.labels(op, str(outcome)).inc(count)

    def _weigh(
        self, op: str, batch: Sequence[Item], outcomes: Sequence[Outcome], done: Outcome
    ) -> None:
        moved = sum(i.view.nbytes for i, o in zip(batch, outcomes, strict=False) if o is done)
        self._bytes.labels(op).inc(moved)


class _Labelled(Collector):
    """A registry's metrics, each with the label `tier`: the node may name a tier late."""

    def __init__(self, registry: CollectorRegistry, tier: Callable[[], str]) -> None:
        self._registry = registry
        self._tier = tier

    def collect(self) -> Iterator[Metric]:
        tier = self._tier()
        for metric in self._registry.collect():
            labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    labelled.samples.append(sample._replace(labels={"tier": tier, **sample.labels}))
            yield labelled


class TierMetrics(Collector):
    """What the wrappers of all tiers that `tiers()` gives collect, family by family."""

    def __init__(self, tiers: Callable[[], Sequence[Tier]]) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for tier in self._tiers():
            for collector in tier.collectors() if isinstance(tier, Wrapper) else ():
                for metric in collector.collect():
                    families.setdefault(
                        metric.name, Metric(metric.name, metric.documentation, metric.type)
                    ).samples.extend(metric.samples)
        yield from families.values()
