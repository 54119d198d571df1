"""What a metered tier tells Prometheus, and what wrappers forward."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from wrap_kit import WRAPPERS, blank, context_of, item, key, memory, options_of, wrapped

from kvstrata.errors import ConfigError
from kvstrata.testing import FakeClock
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.tiers.base import Outcome, Tier
from kvstrata.tiers.wrappers.base import Wrapper
from kvstrata.tiers.wrappers.metered import Metered, MeteredOptions, TierMetrics


@pytest.fixture
def inner() -> MemoryTier:
    return memory(context_of(FakeClock()), verify=True)


def scraped(*tiers: Tier) -> dict[tuple[str, ...], float]:
    """Samples by name and label values, as a server reads them."""
    registry = CollectorRegistry()
    registry.register(TierMetrics(lambda: tiers))
    text = generate_latest(registry).decode()
    assert text.count("# TYPE kvstrata_tier_items_total") <= 1, "one family, one header"
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_calls_are_counted(inner: MemoryTier) -> None:
    tier = Metered.wrap(inner, {}, inner.context)
    items = [item(1, 1000), item(2, 500)]
    await tier.store(items)
    await tier.store(items[:1])
    await tier.load([blank(i) for i in [*items, item(3, 10)]])
    await tier.lookup([key(i) for i in range(4)])
    await tier.evict([key(1), key(9)])
    found = scraped(tier)
    name = "kvstrata_tier_items_total"  # labels: op, outcome, tier
    assert found[name, "store", "stored", "memory"] == 2
    assert found[name, "store", "present", "memory"] == 1
    assert found[name, "load", "loaded", "memory"] == 2
    assert found[name, "load", "missing", "memory"] == 1
    assert found[name, "lookup", "found", "memory"] == 2
    assert found[name, "lookup", "missing", "memory"] == 2
    assert found[name, "evict", "evicted", "memory"] == 1
    assert found["kvstrata_tier_item_bytes_total", "store", "memory"] == 1500
    assert found["kvstrata_tier_item_bytes_total", "load", "memory"] == 1500
    assert found["kvstrata_tier_call_seconds_count", "store", "memory"] == 2
    assert found["kvstrata_tier_calls_running", "store", "memory"] == 0
    await tier.close()


async def test_latencies(inner: MemoryTier) -> None:
    times = iter([0.0, 0.003, 10.0, 10.2])
    tier = Metered(inner, MeteredOptions(), timer=lambda: next(times))
    await tier.lookup([key(1)])
    await tier.lookup([key(1)])
    found = scraped(tier)
    name = "kvstrata_tier_call_seconds_bucket"  # labels: le, op, tier
    assert found[name, "0.0025", "lookup", "memory"] == 0
    assert found[name, "0.005", "lookup", "memory"] == 1
    assert found[name, "0.25", "lookup", "memory"] == 2
    assert found["kvstrata_tier_call_seconds_sum", "lookup", "memory"] == pytest.approx(0.203)
    await tier.close()


async def test_failures_and_what_runs(inner: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Metered.wrap(inner, {}, inner.context)

    async def broken(*_: Any) -> Any:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "lookup", broken)
        with pytest.raises(OSError, match="no"):
            await tier.lookup([key(1)])
    with inner.stalled():
        call = asyncio.ensure_future(tier.load([blank(item(1))]))
        await asyncio.sleep(0)
        assert scraped(tier)["kvstrata_tier_calls_running", "load", "memory"] == 1
        call.cancel()
        await asyncio.wait([call])
    found = scraped(tier)
    assert found["kvstrata_tier_calls_running", "load", "memory"] == 0
    name = "kvstrata_tier_call_failures_total"  # labels: error, op, tier
    assert found[name, "OSError", "lookup", "memory"] == 1
    assert found[name, "CancelledError", "load", "memory"] == 1
    await tier.close()


async def test_several_tiers_in_one_scrape(inner: MemoryTier) -> None:
    first = Metered.wrap(inner, {}, inner.context)
    other = memory(inner.context)
    second = Metered.wrap(other, {}, inner.context)
    second.name = "slow"
    await first.store([item(1)])
    await second.store([item(1), item(2)])
    found = scraped(first, other, second)
    assert found["kvstrata_tier_items_total", "store", "stored", "memory"] == 1
    assert found["kvstrata_tier_items_total", "store", "stored", "slow"] == 2


async def test_within_another_wrapper(inner: MemoryTier, tmp_path: Path) -> None:
    tier = wrapped(inner, ["metered", "checked"], tmp_path, inner.context)
    await tier.store([item(1, 1000)])
    assert scraped(tier)["kvstrata_tier_item_bytes_total", "store", "memory"] == 1128
    await tier.close()


async def test_buckets_are_an_option(inner: MemoryTier) -> None:
    tier = Metered.wrap(inner, {"buckets": [1, 2]}, inner.context)
    await tier.lookup([])
    assert ("kvstrata_tier_call_seconds_bucket", "2.0", "lookup", "memory") in scraped(tier)
    with pytest.raises(ConfigError, match="wrapper metered: bucket"):
        Metered.wrap(inner, {"bucket": []}, inner.context)


# ---------------------------------------------------------------- of every wrapper


def test_wrappers_are_found_by_name() -> None:
    found = {entry.name: entry.load() for entry in entry_points(group="kvstrata.wrappers")}
    assert found == WRAPPERS


@pytest.mark.parametrize("name", list(WRAPPERS))
async def test_what_is_forwarded(name: str, inner: MemoryTier, tmp_path: Path) -> None:
    tier = WRAPPERS[name].wrap(inner, options_of(name, tmp_path), inner.context)
    assert isinstance(tier, Wrapper)
    assert (tier.store_id, tier.name, tier.writable) == ("memory", "memory", True)
    tier.name = "fast"
    assert inner.name == "fast"
    await tier.store([item(1)])
    assert tier.usage().used_bytes == inner.usage().used_bytes
    assert tier.keys() == inner.keys() == [key(1)]
    await tier.close()
    with pytest.raises(ConfigError, match="name it in that tier's `wrap`"):
        await WRAPPERS[name].open({}, inner.context)


@pytest.mark.parametrize("name", list(WRAPPERS))
async def test_answers_that_are_not_one_each(
    name: str, inner: MemoryTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that breaks its contract is not made to look whole."""
    tier = WRAPPERS[name].wrap(inner, options_of(name, tmp_path), inner.context)

    async def few(*_: Any) -> list[Outcome]:
        return [Outcome.LOADED]

    monkeypatch.setattr(inner, "load", few)
    batch = [blank(item(1)), blank(item(2))]
    if name == "metered":
        assert len(await tier.load(batch)) == 1
    else:
        with pytest.raises(ValueError, match="1 answers for 2 keys"):
            await tier.load(batch)
    await tier.close()
