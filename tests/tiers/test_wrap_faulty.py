"""The faulty wrapper: each kind of fault, by script."""

from __future__ import annotations

import asyncio

import pytest
from wrap_kit import blank, context_of, item, key, memory

from kvstrata.errors import ConfigError
from kvstrata.testing import FakeClock
from kvstrata.testing.faulty import HONEST, Fault, FaultScript, Faulty
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.tiers.base import Outcome

STORED, LOADED, FAILED = Outcome.STORED, Outcome.LOADED, Outcome.FAILED


@pytest.fixture
def inner() -> MemoryTier:
    return memory(context_of(FakeClock()))


def always(inner: MemoryTier, kind: Fault, **options: object) -> Faulty:
    return Faulty(inner, FaultScript(5, rate=1.0, kinds=[kind], **options))  # type: ignore[arg-type]


async def test_no_faults_at_rate_0(inner: MemoryTier) -> None:
    tier = Faulty(inner, FaultScript(1, rate=0.0))
    assert await tier.store([item(1)]) == [STORED]
    assert await tier.lookup([key(1)]) == [True]
    assert await tier.load([blank(item(1))]) == [LOADED]
    assert await tier.evict([key(1)]) == [True]
    assert tier.script.injected.total() == 0


async def test_fail_does_nothing(inner: MemoryTier) -> None:
    tier = always(inner, Fault.FAIL)
    assert await tier.store([item(1)]) == [FAILED]
    assert inner.chunks == {}
    await inner.store([item(1)])
    assert await tier.load([blank(item(1))]) == [FAILED]
    assert await tier.lookup([key(1)]) == [False]
    assert await tier.evict([key(1)]) == [False]
    assert list(inner.chunks) == [key(1)]


async def test_drop_does_it_and_says_no(inner: MemoryTier) -> None:
    tier = always(inner, Fault.DROP)
    assert await tier.store([item(1)]) == [FAILED]
    assert list(inner.chunks) == [key(1)]
    assert await tier.load([blank(item(1))]) == [FAILED]
    assert await tier.evict([key(1)]) == [False]
    assert inner.chunks == {}


async def test_flip_changes_one_bit_of_what_is_stored(inner: MemoryTier) -> None:
    tier = always(inner, Fault.FLIP)
    stored = item(1)
    before = bytes(stored.view)
    assert await tier.store([stored]) == [STORED]
    assert stored.view == before, "not in the caller's memory"
    content = inner.chunks[key(1)][0]
    changed = int.from_bytes(content, "big") ^ int.from_bytes(before, "big")
    assert changed.bit_count() == 1
    assert tier.script.damaged == {key(1)}


async def test_flip_changes_one_bit_of_what_is_loaded(inner: MemoryTier) -> None:
    await inner.store([item(1)])
    into = blank(item(1))
    assert await always(inner, Fault.FLIP).load([into]) == [LOADED]
    changed = int.from_bytes(into.view, "big") ^ int.from_bytes(item(1).view, "big")
    assert changed.bit_count() == 1


async def test_truncate(inner: MemoryTier) -> None:
    tier = always(inner, Fault.TRUNCATE)
    assert await tier.store([item(1, 1000)]) == [STORED]
    assert len(inner.chunks[key(1)][0]) == 500
    await inner.store([item(2, 1000)])
    into = blank(item(2, 1000))
    assert await tier.load([into]) == [LOADED]
    assert into.view == bytes(item(2, 1000).view[:500]) + bytes(500)


async def test_raise_before_or_after_the_work(inner: MemoryTier) -> None:
    tier = always(inner, Fault.RAISE)
    for i in range(40):
        with pytest.raises(OSError, match="injected"):
            await tier.store([item(i, 10)])
    assert 5 < len(inner.chunks) < 35


async def test_delays_are_of_the_clock_given(inner: MemoryTier) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    tier = always(inner, Fault.DELAY, longest_delay=3.0, sleep=sleep)
    for _ in range(20):
        assert await tier.lookup([key(1)]) == [False]
    assert len(slept) == 20
    assert 0 <= min(slept) < max(slept) <= 3


async def test_a_hang_ends_by_release(inner: MemoryTier) -> None:
    tier = always(inner, Fault.HANG)
    calls = [asyncio.ensure_future(tier.store([item(i)])) for i in range(2)]
    await tier.script.hanging()
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls)
    tier.script.release()
    assert await asyncio.gather(*calls) == [[STORED], [STORED]]


async def test_closing_ends_hangs(inner: MemoryTier) -> None:
    tier = always(inner, Fault.HANG)
    call = asyncio.ensure_future(tier.lookup([key(1)]))
    await tier.script.hanging()
    await tier.close()
    with pytest.raises(Exception, match="closed"):
        await call


async def test_quiet(inner: MemoryTier) -> None:
    tier = always(inner, Fault.FAIL)
    with tier.script.quiet():
        assert await tier.store([item(1)]) == [STORED]
    assert await tier.lookup([key(1)]) == [False]


async def test_the_rate(inner: MemoryTier) -> None:
    tier = Faulty(inner, FaultScript(3, rate=0.05, kinds=[Fault.FAIL]))
    outcomes = await tier.store([item(i, 1) for i in range(2000)])
    assert 60 < outcomes.count(FAILED) < 140


async def test_from_settings(inner: MemoryTier, caplog: pytest.LogCaptureFixture) -> None:
    tier = Faulty.wrap(inner, {"rate": 1.0, "kinds": ["fail"]}, inner.context)
    assert f"seed {tier.script.seed}" in caplog.text
    assert await tier.store([item(1)]) == [FAILED]
    assert Faulty.wrap(inner, {"seed": 9}, inner.context).script.seed == 9
    assert Fault.FLIP not in HONEST, "no wrong bytes unless asked for"
    with pytest.raises(ConfigError, match="wrapper faulty: kinds"):
        Faulty.wrap(inner, {"kinds": ["oops"]}, inner.context)
