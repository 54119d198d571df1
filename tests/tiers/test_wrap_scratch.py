"""Scratch memory: bounded, in order, reused; and what happens to a wrapper without any left."""

from __future__ import annotations

import asyncio
import mmap
from pathlib import Path

import pytest
from wrap_kit import blank, context_of, item, memory, wrapped

from kvstrata.testing import FakeClock
from kvstrata.tiers.base import Outcome
from kvstrata.tiers.wrappers.checked import Checked
from kvstrata.tiers.wrappers.scratch import Scratch

PAGE = mmap.PAGESIZE


async def test_views_are_what_was_asked_for() -> None:
    scratch = Scratch(8 * PAGE)
    views = await scratch.take([1, PAGE, PAGE + 1], 1)
    assert views is not None
    assert [view.nbytes for view in views] == [1, PAGE, PAGE + 1]
    for i, view in enumerate(views):
        view[:] = bytes([i + 1]) * view.nbytes
    assert [view[0] for view in views] == [1, 2, 3]
    assert scratch.held_bytes == 4 * PAGE


async def test_memory_is_reused_and_bounded() -> None:
    scratch = Scratch(8 * PAGE)
    seen = set()
    for _ in range(50):
        views = await scratch.take([PAGE] * 4, 1)
        assert views is not None
        seen |= {id(view.obj) for view in views}
        scratch.give_back(views)
        assert scratch.held_bytes <= 8 * PAGE
    assert len(seen) == 4
    views = await scratch.take([3 * PAGE, 3 * PAGE], 1)
    assert views is not None
    assert scratch.held_bytes <= 8 * PAGE, "idle memory of another size counts too"


async def test_what_does_not_fit_waits_in_order() -> None:
    scratch = Scratch(4 * PAGE)
    first = await scratch.take([3 * PAGE], 1)
    order: list[str] = []

    async def take(name: str, pages: int) -> None:
        views = await scratch.take([pages * PAGE], 20)
        assert views is not None
        order.append(name)
        scratch.give_back(views)

    waiting = [asyncio.create_task(take("large", 4)), asyncio.create_task(take("small", 1))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [], "the small one must not starve the large one"
    assert first is not None
    scratch.give_back(first)
    await asyncio.gather(*waiting)
    assert order == ["large", "small"]


async def test_no_memory_in_time() -> None:
    scratch = Scratch(4 * PAGE)
    held = await scratch.take([4 * PAGE], 1)
    assert await scratch.take([PAGE], 0.01) is None
    assert await scratch.take([PAGE], -1) is None
    assert held is not None
    scratch.give_back(held)
    assert await scratch.take([PAGE], 1) is not None


async def test_more_than_there_is_alone() -> None:
    scratch = Scratch(4 * PAGE)
    held = await scratch.take([PAGE], 1)
    assert await scratch.take([9 * PAGE], 0.01) is None
    assert held is not None
    scratch.give_back(held)
    large = await scratch.take([9 * PAGE], 1)
    assert large is not None
    assert await scratch.take([PAGE], 0.01) is None
    scratch.give_back(large)
    assert scratch.held_bytes <= 4 * PAGE


async def test_a_cancelled_wait_takes_nothing() -> None:
    scratch = Scratch(4 * PAGE)
    held = await scratch.take([4 * PAGE], 1)
    waiting = asyncio.create_task(scratch.take([PAGE], 20))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert held is not None
    scratch.give_back(held)
    assert await scratch.take([4 * PAGE], 1) is not None


# ---------------------------------------------------------------- in a wrapper


async def test_batches_larger_than_the_scratch_memory(tmp_path: Path) -> None:
    context = context_of(FakeClock())
    tier = Checked.wrap(memory(context), {"scratch": "64KiB"}, context)
    items = [item(i, 20_000) for i in range(20)] + [item(20, 100_000)]
    assert await tier.store(items) == [Outcome.STORED] * 21
    into = [blank(i) for i in items]
    assert await tier.load(into) == [Outcome.LOADED] * 21
    assert [i.view for i in into] == [i.view for i in items]
    assert tier._incoming.held_bytes <= 32 << 10
    assert tier._outgoing.held_bytes <= 32 << 10
    await tier.close()


@pytest.mark.parametrize("names", [["checked"], ["encrypted", "compressed"]])
async def test_scratch_memory_that_a_hung_medium_holds(tmp_path: Path, names: list[str]) -> None:
    """Later loads fail at their deadline rather than ask the machine for more memory."""
    clock = FakeClock(100.0)
    context = context_of(clock)
    inner = memory(context)
    tier = wrapped(inner, names, tmp_path, context)
    stored = item(1)
    assert await tier.store([stored]) == [Outcome.STORED]
    tier._incoming.capacity = 20_000
    with inner.stalled():
        hung = asyncio.create_task(tier.load([blank(stored)], clock() + 60))
        await asyncio.sleep(0.02)
        assert await tier.load([blank(stored)], clock() + 0.02) == [Outcome.FAILED]
        assert await tier.lookup([stored.key]) == [True]
    assert await hung == [Outcome.LOADED]
    assert await tier.load([blank(stored)]) == [Outcome.LOADED]
    await tier.close()
